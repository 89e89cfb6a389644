"""Chats become token ids once, and grow only at their end."""

import pytest

from klinic.errors import ConfigError, DataError
from klinic.model.chat import PromptEncoder
from klinic.model.tiny import CHAT_TEMPLATE, tiny_tokenizer

ASKED = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
REPLY = {"role": "tool", "content": "two"}
LOOP = "{% for m in messages %}"
END = "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"


def encoder(template=CHAT_TEMPLATE):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return PromptEncoder(tokenizer, "tiny")


def test_a_chat_goes_through_the_template_and_is_encoded_as_it_stands():
    encoded = encoder()(ASKED)
    assert encoded.text == "system: add<|eos|>\nuser: 1+1<|eos|>\nassistant: "
    assert encoded.messages == tuple(ASKED)
    tokenizer = tiny_tokenizer()
    assert encoded.token_ids == tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_dict=False
    )
    assert encoded.token_ids.count(tokenizer.eos_token_id) == 2


def test_a_text_is_encoded_as_the_tokenizer_begins_texts_and_a_chat_is_not():
    class WithBos:
        chat_template = CHAT_TEMPLATE

        def encode(self, text, add_special_tokens=True):
            return [0] * add_special_tokens + [ord(c) for c in text]

        def apply_chat_template(self, messages, **how):
            return tiny_tokenizer().apply_chat_template(messages, **how)

    encode = PromptEncoder(WithBos(), "with a first token")
    assert encode("a").token_ids == [0, ord("a")]
    assert encode(ASKED).token_ids[0] == ord("s")  # the template writes its own first token


def test_what_a_table_fills_with_nothing_is_left_out():
    padded = [{**message, "tool_calls": None, "name": None} for message in ASKED]
    assert encoder()(padded).messages == tuple(ASKED)


def test_tools_reach_the_template():
    template = "{% for t in tools %}{{ t.name }};{% endfor %}" + CHAT_TEMPLATE
    assert encoder(template)(ASKED, [{"name": "calc"}]).text.startswith("calc;system")


@pytest.mark.parametrize("said", ["4", "", "<|eos|>", "{{ messages }}", "user: 9<|eos|>\n"])
def test_the_bridge_is_the_same_whatever_was_said(said):
    encode = encoder()
    eos = tiny_tokenizer().eos_token_id
    before = [*ASKED, {"role": "assistant", "content": said}]
    bridge = encode.encode_between_turns(before, REPLY, end_id=eos)
    # the policy ended its turn with the end-of-turn token, so the bridge begins behind it
    assert tiny_tokenizer().decode(bridge) == "\ntool: two<|eos|>\nassistant: "


def test_prompt_said_and_bridge_are_the_ids_of_the_whole_chat():
    encode, tokenizer = encoder(), tiny_tokenizer()
    turn = {"role": "assistant", "content": "calc 1+1"}
    said = [*encode.encode_text("calc 1+1"), tokenizer.eos_token_id]
    ids = encode(ASKED).token_ids + said
    ids += encode.encode_between_turns([*ASKED, turn], REPLY, end_id=said[-1])
    assert ids == encode([*ASKED, turn, REPLY]).token_ids


REWRITING = {
    "drops thoughts": LOOP
    + "{{ m.role }}: {{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "<|eos|>\n" + END,
    "drops earlier turns": LOOP
    + "{% if m.role != 'assistant' or loop.last %}{{ m.role }}: {{ m.content }}<|eos|>\n{% endif %}"
    + END,
    "strips": LOOP + "{{ m.role }}: {{ m.content.strip() }}<|eos|>\n" + END.replace(": ", ":\n "),
    "counts messages": "{{ messages | length }}" + CHAT_TEMPLATE,
    "marks the last tool turn": LOOP
    + "{{ m.role }}{% if m.role == 'tool' and loop.last %}!{% endif %}: {{ m.content }}<|eos|>\n"
    + END,
}


@pytest.mark.parametrize("name", REWRITING)
def test_a_template_that_rewrites_history_is_refused(name):
    encode = encoder(REWRITING[name])
    with pytest.raises(ConfigError, match="the chat template of tiny rewrites history") as error:
        encode.check_history(ASKED, REPLY)
    assert "becomes" in str(error.value)


def test_a_template_that_only_grows_is_accepted():
    encoder().check_history(ASKED, REPLY)


def test_a_model_without_a_template_and_a_template_that_refuses_are_named():
    with pytest.raises(ConfigError, match="the tokenizer of tiny has no chat template"):
        encoder(None)(ASKED)
    refusing = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DataError, match="rejects a chat of system, user: roles must alternate"):
        encoder(refusing)(ASKED)
