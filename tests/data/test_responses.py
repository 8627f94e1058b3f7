"""Examples with responses: which tokens are learned, whatever the template, and what is refused."""

import json

import numpy as np
import pytest

from zero_jax.data.conversations import (
    ChatTemplate,
    Conversation,
    SimpleTemplate,
    instructions,
    load_template,
    preference,
    read_rows,
)
from zero_jax.data.response_rows import (
    PairRows,
    ResponseRows,
    encode,
    encode_rows,
    fitting,
    fitting_pairs,
    split_examples,
)
from zero_jax.data.tokenizer import ByteTokenizer, SpecialByteTokenizer
from zero_jax.errors import UsageError

CHAT = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"}]
LLAMA_3 = ("{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}"
           "<|eot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}")


def learned(row, template=None, tokenizer=None):
    """(all text, the parts that are learned) of a line."""
    tokenizer = tokenizer or ByteTokenizer()
    (example,) = encode(instructions(row, template or SimpleTemplate(), "x.jsonl, line 1"), tokenizer)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], example.response.astype(int), [0]])))
    parts = [example.tokens[start:stop] for start, stop in edges.reshape(-1, 2)]
    return tokenizer.decode(example.tokens), [tokenizer.decode(part) for part in parts], example


def test_responses_alone_are_learned():
    assert learned({"prompt": "def f", "completion": "(): 1"})[:2] == ("def f(): 1", ["(): 1"])
    whole, parts, _ = learned({"messages": CHAT})
    assert parts == ["4", "Yes"]
    assert whole.startswith("<|system|>\nBe kind.\n<|user|>\n2 + 2?\n<|assistant|>\n4\n<|user|>\nSure?\n")
    template = ChatTemplate(LLAMA_3, {"bos_token": "<s>"}, "t.json")
    whole, parts, _ = learned({"messages": CHAT}, template)
    assert parts == ["4<|eot|>", "Yes<|eot|>"] and whole.startswith("<s><|system|>\nBe kind.<|eot|><|user|>")
    # The end of text belongs to a response, where the tokenizer has one.
    _, parts, example = learned({"prompt": "a", "completion": "b"}, tokenizer=SpecialByteTokenizer())
    assert example.tokens.tolist() == [97, 98, 256] and example.response.tolist() == [False, True, True]


def test_the_template_of_a_tokenizer_is_used(tmp_path):
    assert isinstance(load_template(tmp_path), SimpleTemplate)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(
        {"chat_template": [{"name": "default", "template": LLAMA_3}], "bos_token": {"content": "<s>"}}))
    assert learned({"messages": CHAT}, load_template(tmp_path / "tokenizer.json"))[1] == ["4<|eot|>", "Yes<|eot|>"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    assert learned({"messages": CHAT}, load_template(tmp_path))[1] == ["4;", "Yes;"]


TOOLS = ("{%- if not style is defined %}{% set style = 'plain' %}{% endif %}[{{ style }}]{% if tools %}TOOLS "
         "{{ tools | tojson }};{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content or '' }}"
         "{% for call in m.tool_calls or [] %}<{{ call.name }}>{% endfor %}"
         "{% if m.role == 'tool' %}({{ m.name }}){% endif %};{% endfor %}"
         "{% if add_generation_prompt %}assistant:{% endif %}")
CALLS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "tool_calls": [{"name": "add"}]},
         {"role": "tool", "content": "4", "name": "add"}, {"role": "assistant", "content": "It is 4"}]


def test_tools_options_and_weights_are_honoured():
    template, row = ChatTemplate(TOOLS, {}, "t.json"), {"messages": CALLS}
    plain = learned(row, template)
    assert plain[:2] == ("[plain]user:2 + 2?;assistant:<add>;tool:4(add);assistant:It is 4;", ["<add>;", "It is 4;"])
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):  # JSON of them, as columns of Parquet have it
        assert learned(row | {"tools": tools}, template)[0] == plain[0].replace("]", ']TOOLS [{"name": "add"}];', 1)
    for options in ({"style": "kind"}, '{"style": "kind"}'):
        assert learned(row | {"chat_template_kwargs": options}, template)[0] == plain[0].replace("plain", "kind")
    for nothing in ({"tools": []}, {"tools": None}, {"chat_template_kwargs": {}}):  # the control
        assert learned(row | nothing, template)[:2] == plain[:2]
    for each in (SimpleTemplate(), ChatTemplate(LLAMA_3, {"bos_token": ""}, "t.json")):
        for weights, texts in (((0, 1), ["Yes"]), ((1, 0), ["4"]), ((1, 1), ["4", "Yes"]), ((None, 0), ["4"])):
            first, second = ({"weight": weight} for weight in weights)
            messages = [*CHAT[:2], CHAT[2] | first, CHAT[3] | {"weight": 0}, CHAT[4] | second]
            whole, parts, _ = learned({"messages": messages}, each)
            assert [part.removesuffix("<|eot|>") for part in parts] == texts
            assert whole == learned({"messages": CHAT}, each)[0], "what is not learned is read"
    assert not template.unread


def test_fields_that_nothing_reads_are_named():
    template = ChatTemplate(TOOLS, {}, "t.json")
    learned({"messages": [CHAT[1] | {"name": "Ann"}, CHAT[2] | {"id": 3}], "source": "web", "empty": None}, template)
    learned({"prompt": "a", "completion": "b", "score": 0}, template)
    preference({"prompt": "a", "chosen": "b", "rejected": "c", "rank": 1}, template, "")
    assert template.unread == {"messages.name", "messages.id", "source", "score", "rank"}


REFUSED = [
    ({"messages": CHAT, "tools": [{"name": "add"}]}, "tools: .* does not take it from a row"),
    ({"messages": CHAT, "chat_template_kwargs": {"style": "kind"}}, "style: .* does not take it from a row"),
    ({"messages": CHAT, "tools": "add"}, "tools is str: give a list"),
    ({"messages": CHAT, "chat_template_kwargs": [1]}, "chat_template_kwargs is list: give an object"),
    ({"messages": CALLS}, "tool_calls of a message"),
    ({"messages": [CHAT[1], CHAT[2] | {"reasoning_content": "2 and 2"}]}, "reasoning_content of a message"),
    ({"messages": [CHAT[1], CHAT[2] | {"train": False}]}, "train of a message"),
    ({"messages": [CHAT[1] | {"weight": 1}, CHAT[2]]}, "weight 1 of the user: give 0 or 1"),
    *(({"messages": [CHAT[1], CHAT[2] | {"weight": weight}]}, "weight .* of the assistant: give 0 or 1")
      for weight in (0.5, -1, "0", [0])),
    ({"messages": [CHAT[1], CHAT[2] | {"weight": 0}]}, "a weight that is not 0"),
    ({"messages": CHAT, "weight": 0}, "weight would change what is learned"),
    ({"messages": CHAT, "images": ["a.png"]}, "images would change what is learned"),
    ({"prompt": "a", "completion": "b", "tools": [1]}, "tools is for a chat template"),
    ({"prompt": "a", "completion": "b", "system": "Be kind."}, "system would change what is learned"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [1]}, "tools is for a chat template"),
    ({"chosen": CHAT, "rejected": [*CHAT[:4], CHAT[4] | {"content": "No", "weight": 0}]}, "a message has a weight")]


@pytest.mark.parametrize("template", [SimpleTemplate(), ChatTemplate(LLAMA_3, {"bos_token": ""}, "t.json")])
@pytest.mark.parametrize(("row", "message"), REFUSED)
def test_fields_that_cannot_be_honoured_are_refused_by_name(template, row, message):
    with pytest.raises(UsageError, match=message):
        (preference if "chosen" in row else instructions)(row, template, "x.jsonl, line 1")


def test_options_that_a_template_would_overwrite_are_refused():
    for name in ("messages", "add_generation_prompt", "documents", "m", "call", "other"):
        with pytest.raises(UsageError, match=f"{name}: .* does not take it from a row"):
            instructions({"messages": CHAT, "chat_template_kwargs": {name: 1}}, ChatTemplate(TOOLS, {}, "t.json"), "x")


@pytest.mark.parametrize("pack", [False, True])
def test_rows_have_weights_where_the_target_is_a_response(pack):
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "x", "completion": "yz"}]
    examples = encode([spans for row in rows for spans in instructions(row, SimpleTemplate(), "")], ByteTokenizer())
    source = ResponseRows(examples, 8, pack=pack, pad=0)
    assert source.num_examples == (1 if pack else 2)
    found = [bytes(row["targets"][row["weights"] > 0].tolist()).decode() for row in map(
        source.row, range(source.num_examples))]
    assert "".join(sorted("".join(found))) == "cdyz" and ("segment_ids" in source.row(0)) == pack
    for row in map(source.row, range(source.num_examples)):  # each target follows its input, none is of another example
        pairs = {(chr(a), chr(b)) for a, b, w in zip(row["inputs"], row["targets"], row["weights"], strict=True) if w}
        assert pairs <= {("b", "c"), ("c", "d"), ("x", "y"), ("y", "z")}
    # Negative control: learned prompts would have these, too.
    assert any(source.row(0)["targets"][source.row(0)["weights"] == 0])


def test_long_examples_are_cut_or_left_out():
    rows = [("a" * 3, "b" * 20), ("a" * 30, "b"), ("a", "b")]
    examples = encode_rows([instructions({"prompt": prompt, "completion": answer}, SimpleTemplate(), "")
                            for prompt, answer in rows], ByteTokenizer())
    kept, cut, left_out = fitting(examples, 8)
    assert ([len(each.tokens) for each in kept], cut, left_out) == ([9, 2], 1, 1)
    with pytest.raises(UsageError, match="No response is left of 1 examples in rows of seq_len=8"):
        fitting(examples[1:2], 8)
    assert split_examples([1, 2, 3, 4], 0.1, 2) == ([1, 2], [3, 4])
    with pytest.raises(UsageError, match="too few to hold 3 of them out"):
        split_examples([1, 2, 3, 4], 0.1, 3)


def test_pairs_that_are_the_same_once_they_are_cut_are_left_out():
    rows = [("aaa", "same, and A", "same, and B"), ("a", "A", "B"), ("a", "A" * 9, "A" * 10)]
    pairs = [tuple(encode([*preference({"prompt": prompt, "chosen": chosen, "rejected": rejected}, SimpleTemplate(),
                                       "")], ByteTokenizer())) for prompt, chosen, rejected in rows]
    for length, expected in ((8, ([2], 0, 2)), (10, ([2, 10], 0, 1)), (32, ([14, 2, 10], 0, 0))):
        kept, cut, left_out = fitting_pairs(pairs, length)
        assert ([len(chosen.tokens) for chosen, _ in kept], cut, left_out) == expected
    with pytest.raises(UsageError, match="No two responses that differ are left of 1 examples in rows"):
        fitting_pairs(pairs[:1], 8)


def test_pairs():
    row = {"prompt": CHAT[:2], "chosen": [CHAT[2]], "rejected": [{"role": "assistant", "content": "5!"}]}
    examples = encode([*preference(row, SimpleTemplate(), "")], ByteTokenizer())
    row = PairRows([tuple(examples)], 64, pad=0).row(0)
    texts = [bytes(row["targets"][k][row["weights"][k] > 0].tolist()).decode() for k in range(2)]
    assert texts == ["4", "5!"] and row["inputs"].shape == (2, 64) and row["reference"].shape == (2,)
    # Of a conversation the last response alone is compared.
    chosen, rejected = preference({"chosen": CHAT, "rejected": [*CHAT[:4], {"role": "assistant", "content": "No"}]},
                                  SimpleTemplate(), "")
    assert [[span.text for span in each if span.response] for each in (chosen, rejected)] == [["Yes"], ["No"]]


@pytest.mark.parametrize(("row", "message"), [
    ({"prompt": "a", "completion": ""}, "line 2: completion is empty: there is no response to learn"),
    ({"prompt": "a"}, "it has the fields prompt: give prompt and completion, or messages"),
    ({"prompt": 1, "completion": "a"}, "prompt is int and no text"),
    ({"messages": []}, "messages is no list of messages"),
    ({"messages": [{"role": "usr", "content": "a"}]}, "the role 'usr' is none of system, user"),
    ({"messages": CHAT[:2]}, "no message of the assistant has a text"),
    ({"messages": [{"role": "user"}]}, "each message is an object with a role and a content")])
def test_lines_without_a_response_are_told(tmp_path, row, message):
    (tmp_path / "x.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"}) + "\n" + json.dumps(row))
    with pytest.raises(UsageError, match="x.jsonl, line 2: ") as error:
        for where, each in read_rows(str(tmp_path / "x.jsonl")):
            instructions(each, SimpleTemplate(), where)
    assert message in str(error.value)


BLOCKS = ("{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}"
          "{% if loop.last %}({{ m.reasoning_content }}){% endif %}{{ m.content }};{% endgeneration %}{% else %}"
          "{{ m.content }}{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")


def test_blocks_of_generation_are_what_is_learned():
    """Thoughts are written of the last message alone, as Qwen 3 does: all in one rendering, and in one example."""
    messages = [*CHAT[:4], CHAT[4] | {"reasoning_content": "Hm"}]
    template = ChatTemplate(BLOCKS, {}, "t.json")
    whole, parts, _ = learned({"messages": messages}, template)
    assert parts == ["4;", "(Hm)Yes;"]
    assert whole == ("<system>Be kind.\n<user>2 + 2?\n<assistant>4;\n<user>Sure?\n<assistant>(Hm)Yes;\n")
    first = [*CHAT[:2], CHAT[2] | {"weight": 0}, *messages[3:]]
    assert learned({"messages": first}, template)[:2] == (whole, ["(Hm)Yes;"])
    history = template.prompt(Conversation(messages[:3]), "x")
    assert history == "<system>Be kind.\n<user>2 + 2?\n<assistant>()4;\n<assistant>"
    chosen, _ = preference({"prompt": messages[:4], "chosen": messages[4:], "rejected": CHAT[4:]}, template, "x")
    assert [span.text for span in chosen if span.response] == ["(Hm)Yes;"]
    without = BLOCKS.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert len(instructions({"messages": messages}, ChatTemplate(without, {}, "t.json"), "x")) == 2  # the control


@pytest.mark.parametrize(("source", "row", "message"), [
    ("{% if false %}{% generation %}{% endgeneration %}{% endif %}x", CHAT, "no block {% generation %} for it"),
    ("{% generation %}a{% generation %}b{% endgeneration %}{% endgeneration %}", CHAT, "one within another"),
    (BLOCKS, [CHAT[1], CHAT[2] | {"content": "\ufdd0"}], "a text has U.FDD0"),
    ("{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
     [*CHAT[:2], CHAT[2] | {"weight": 0}, *CHAT[3:]], "5 blocks {% generation %} for 2 messages .* a weight of 0"),
    ("{% generation %}", CHAT, "is no template of Jinja2")])
def test_blocks_without_a_place_are_refused(source, row, message):
    with pytest.raises(UsageError, match=message):
        learned({"messages": row}, ChatTemplate(source, {}, "t.json"))


def test_a_preference_needs_a_block_for_each_message():
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(UsageError, match="chosen: .* writes 2 blocks {% generation %}, not one for each"):
        preference({"prompt": [CHAT[1]], "chosen": CHAT[2:3], "rejected": CHAT[4:]},
                   ChatTemplate(source, {}, "t.json"), "x")


@pytest.mark.parametrize(("source", "message"), [
    ("{{ raise_exception('no system') }}", "does not take these messages: no system"),
    ("{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | length }}", "otherwise than after the prompt"),
    ("{{ ''.__class__.__mro__ }}{{ messages.append(1) }}", "does not take these messages"),
    ("{% if %}", "is no template of Jinja2")])
def test_templates_that_do_not_fit_are_told(source, message):
    with pytest.raises(UsageError, match=message):
        learned({"messages": CHAT}, ChatTemplate(source, {}, "t.json"))


def test_parquet_has_the_rows_of_json_lines(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"prompt": "2 + 2 = ", "completion": "4"}, {"messages": CHAT},
            {"messages": [{**CHAT[1], "name": "ada"}, *CHAT[2:]]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parquet.write_table(arrow.Table.from_pylist([dict.fromkeys(("prompt", "completion", "messages")) | row
                                                 for row in rows]), tmp_path / "a.parquet")
    assert parquet.read_table(tmp_path / "a.parquet").to_pylist()[0] != rows[0], "it has nulls"
    lines, others = ([*read_rows(str(tmp_path / name))] for name in ("a.jsonl", "a.parquet"))
    assert [row for _, row in others] == [row for _, row in lines] == rows
    assert others[1][0].endswith("a.parquet, row 2")
    parquet.write_table(arrow.table({"prompt": ["a"], "text": ["b"]}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="b.parquet, row 1: it has the fields prompt, text: give prompt and"):
        [instructions(row, SimpleTemplate(), where) for where, row in read_rows(str(tmp_path / "b.parquet"))]
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(UsageError, match="c.parquet is no whole Parquet file"):
        next(read_rows(str(tmp_path / "c.parquet")))
    (tmp_path / "d.txt").write_text("text")
    with pytest.raises(UsageError, match="name .jsonl or .parquet files"):
        next(read_rows(str(tmp_path / "d.txt")))


def test_pairs_without_a_preference_are_told():
    with pytest.raises(UsageError, match="chosen and rejected are the same"):
        preference({"prompt": "a", "chosen": "b", "rejected": "b"}, SimpleTemplate(), "line 1")
    with pytest.raises(UsageError, match="rejected does not end with a text of the assistant"):
        preference({"prompt": CHAT[:2], "chosen": [CHAT[2]], "rejected": CHAT[:2]}, SimpleTemplate(), "line 1")
