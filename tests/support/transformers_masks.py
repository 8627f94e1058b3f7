"""What transformers marks as the assistant's of conversations, recorded in tests/data/generation_masks.json.

    PYTHONPATH=tests python -m support.transformers_masks > tests/data/generation_masks.json

It needs transformers; 4.56.2 and 5.24.0 give the same.
"""

import itertools
import json
import sys

THOUGHTS = """\
{%- set last = namespace(user=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set said = m.content or '' %}
        {%- set thought = m.reasoning_content or said.rpartition('</think>')[0].rpartition('<think>')[2] %}
        {%- set text = namespace(all=said.split('</think>')[-1].lstrip('\\n')) %}
        {%- for call in m.tool_calls or [] %}
            {%- set text.all = text.all + ('\\n' if text.all else '') + '<tool_call>\\n{"name": "' + call.name
                + '", "arguments": ' + (call.arguments | tojson) + '}\\n</tool_call>' %}
        {%- endfor %}
        {%- if loop.index0 > last.user and (loop.last or thought) %}
            {%- set text.all = '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + text.all %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- text.all + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Writes turns as Qwen 3's template: thoughts after the last question alone, and empty ones of the last message."""

TEMPLATES = {
    "thoughts": THOUGHTS,
    "spaces": "{% for m in messages %}\n[{{ m.role }}]\n    {%- if m.role == 'assistant' %}\n  {% generation -%}\n  "
              "{{ m.content }} \n {%- endgeneration %}\n  .{% else %}{{ m.content }}{% endif %}\n{% endfor %}",
    "twice": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}a{% endgeneration %}-"
             "{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"}

ASKED, SURE = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "Sure?"}
CONVERSATIONS = {
    "turns": [{"role": "system", "content": "Be kind."}, ASKED, {"role": "assistant", "content": "4"}, SURE,
              {"role": "assistant", "content": "Yes"}],
    "thoughts": [ASKED, {"role": "assistant", "content": "4", "reasoning_content": "two, four"}, SURE,
                 {"role": "assistant", "content": "Yes", "reasoning_content": "\nit is\n"}],
    "inline": [ASKED, {"role": "assistant", "content": "<think>\ntwo, four\n</think>\n\n4"}, SURE,
               {"role": "assistant", "content": "<think>\nit is\n</think>\n\nYes"}],
    "tools": [ASKED, {"role": "assistant", "content": "", "reasoning_content": "a tool",
                      "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": 2}}]},
              {"role": "tool", "content": "4"}, {"role": "assistant", "content": "It is 4"}, SURE,
              {"role": "assistant", "content": "Yes"}]}


def masked(template, conversation):
    """(The text, the parts of it that transformers marks as the assistant's), by a tokenizer of bytes."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_ = tokenizers.Tokenizer(tokenizers.models.BPE({letter: k for k, letter in enumerate(alphabet)}, []))
    bytes_.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_)
    found = tokenizer.apply_chat_template(conversation, chat_template=template, tokenize=True, return_dict=True,
                                          return_assistant_tokens_mask=True)
    groups = itertools.groupby(zip(found["input_ids"], found["assistant_masks"], strict=True), key=lambda pair: pair[1])
    return bytes_.decode(found["input_ids"]), [
        bytes_.decode([token for token, _ in group]) for learned, group in groups if learned]


def main():
    import transformers

    found = {name: {kind: masked(template, conversation) for kind, conversation in CONVERSATIONS.items()}
             for name, template in TEMPLATES.items()}
    json.dump({"transformers": transformers.__version__, "masks": found}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
