"""Conversations of several turns in templates that write earlier turns otherwise, and transformers' masks of blocks."""

import json
from pathlib import Path

import pytest
from support.transformers_masks import CONVERSATIONS, TEMPLATES, THOUGHTS

from zero_jax.data.conversations import ChatTemplate, Conversation, instructions, preference
from zero_jax.data.response_rows import Example, encode_rows, split_examples
from zero_jax.data.tokenizer import ByteTokenizer
from zero_jax.errors import UsageError

RECORDED = json.loads((Path(__file__).parent / "generation_masks.json").read_text())["masks"]
PLAIN = THOUGHTS.replace("{%- generation %}", "").replace("{%- endgeneration %}", "")


def texts(spans):
    return "".join(span.text for span in spans), [span.text for span in spans if span.response]


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_blocks_are_what_transformers_marks(name, conversation):
    (spans,) = ChatTemplate(TEMPLATES[name], {}, "t").examples(Conversation(CONVERSATIONS[conversation]), "x")
    text, learned = texts(spans)
    recorded, marked = RECORDED[name][conversation]
    assert (text, [part for part in learned if part]) == (recorded, marked)
    # The control: another place of the mark is another mask.
    other = TEMPLATES[name].replace("{%- endgeneration %}", ".{%- endgeneration %}").replace(
        "{% endgeneration %}", ".{% endgeneration %}")
    (spans,) = ChatTemplate(other, {}, "t").examples(Conversation(CONVERSATIONS[conversation]), "x")
    assert texts(spans)[1] != marked


@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_each_response_is_learned_as_the_model_is_to_write_it(conversation):
    """After the prompt that it will have, which has no earlier thoughts. One rendering of all would lose them."""
    messages, template = CONVERSATIONS[conversation], ChatTemplate(PLAIN, {}, "t")
    examples = instructions({"messages": messages}, template, "x")
    expected = []
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt = template.prompt(Conversation(messages[:number]), "x")
            whole = template._text(messages[:number + 1], Conversation(messages), "x")
            expected.append((prompt, whole.removeprefix(prompt)))
    found = []
    for spans in examples:
        before = ""
        for span in spans:
            found += [(before, span.text)] * span.response
            before += span.text
    assert found == expected and all("</think>" in answer for _, answer in found)
    assert len(examples) == 2 and sum(map(len, examples)) == 2 * len(found)  # tools: two responses share an example
    _, once = texts(ChatTemplate(THOUGHTS, {}, "t").examples(Conversation(messages), "x")[0])
    assert "</think>" not in once[0], "what one rendering has of the first turn"


def test_a_template_that_keeps_thoughts_needs_one_example():
    """The control: what makes examples several is the text alone."""
    keeps = PLAIN.replace("loop.index0 > last.user and (loop.last or thought)", "thought")
    (spans,) = instructions({"messages": CONVERSATIONS["thoughts"]}, ChatTemplate(keeps, {}, "t"), "x")
    assert ["</think>" in answer for answer in texts(spans)[1]] == [True, True]


def test_thoughts_that_are_dropped_later_are_read():
    """Of each message as the last one; a field that no rendering reads is refused by name."""
    template = ChatTemplate(PLAIN, {}, "t")
    assert not template.unread_by(Conversation(CONVERSATIONS["thoughts"]), "x")
    with pytest.raises(UsageError, match="thinking of a message: .* does not read it"):
        instructions({"messages": [CONVERSATIONS["turns"][1], CONVERSATIONS["turns"][2] | {"thinking": "Hm"}]},
                     template, "x")


def test_weights_and_pairs_of_turns():
    first, second = ({**message, "weight": 0} if message["role"] == "assistant" else message
                     for message in CONVERSATIONS["thoughts"][1::2])
    messages, template = CONVERSATIONS["thoughts"], ChatTemplate(PLAIN, {}, "t")
    for weighted, answer in (([messages[0], first, *messages[2:]], "it is"), ([*messages[:3], second], "two, four")):
        (spans,) = instructions({"messages": weighted}, template, "x")
        assert [answer in text for text in texts(spans)[1]] == [True]
    chosen, rejected = preference({"prompt": messages[:3], "chosen": messages[3:],
                                   "rejected": [{"role": "assistant", "content": "No"}]}, template, "x")
    assert [texts(each)[1] for each in (chosen, rejected)] == [
        ["<think>\nit is\n</think>\n\nYes<|im_end|>\n"], ["<think>\n\n</think>\n\nNo<|im_end|>\n"]]
    assert "two, four" not in chosen[0].text


def test_the_examples_of_a_conversation_are_in_one_part():
    template = ChatTemplate(PLAIN, {}, "t")
    rows = [instructions({"messages": CONVERSATIONS["turns"]}, template, "x")] * 5
    examples = encode_rows(rows, ByteTokenizer())
    assert [each.begins for each in examples] == [True, False] * 5
    for fraction in (0.3, 0.4):  # three of ten would cut a conversation
        train, held_out = split_examples(examples, fraction, 2)
        assert (len(train), len(held_out)) == (6, 4) and held_out[0].begins
    alone = [Example(each.tokens, each.response) for each in examples]  # the control
    assert len(split_examples(alone, 0.3, 2)[1]) == 3
