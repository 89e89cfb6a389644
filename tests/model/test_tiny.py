"""The tiny model and its tokenizer: nothing is lost between text and ids, and seeds decide."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from klinic.model.tiny import CHARACTERS, EOS, PAD, SPECIAL, UNKNOWN, tiny_model, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
IDS = st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40)


@pytest.fixture(scope="module")
def model():
    return tiny_model(TOKENIZER, seed=1)


@given(st.text(alphabet=CHARACTERS, max_size=60))
def test_every_character_is_one_token_and_comes_back(text):
    ids = TOKENIZER.encode(text)
    assert len(ids) == len(text)
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.unk_token_id not in ids


@given(IDS)
def test_whatever_the_model_writes_is_read_back_as_the_same_ids(ids):
    assert TOKENIZER.encode(TOKENIZER.decode(ids)) == ids


@pytest.mark.parametrize("special", SPECIAL)
def test_no_characters_spell_a_special_token(special):
    assert not set(special) <= set(CHARACTERS)
    spelled = [TOKENIZER.encode(c)[0] for c in special if c in CHARACTERS]
    assert TOKENIZER.encode(TOKENIZER.decode(spelled)) == spelled


def test_each_special_token_has_an_id_of_its_own():
    assert len({TOKENIZER.convert_tokens_to_ids(token) for token in SPECIAL}) == 3
    assert len(TOKENIZER) == len(CHARACTERS) + 3
    assert (TOKENIZER.pad_token, TOKENIZER.eos_token, TOKENIZER.unk_token) == (PAD, EOS, UNKNOWN)
    assert TOKENIZER.bos_token is None


def test_an_unknown_character_is_one_unknown_token():
    unknown = TOKENIZER.unk_token_id
    assert TOKENIZER.encode("é4Z") == [unknown, *TOKENIZER.encode("4"), unknown]


def test_special_tokens_are_dropped_from_text_when_asked():
    ids = [TOKENIZER.pad_token_id, *TOKENIZER.encode("a b ."), TOKENIZER.eos_token_id]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == "a b ."


def test_prompts_are_padded_on_the_left():
    batch = TOKENIZER(["1", "12"], padding=True)
    assert set(batch) == {"input_ids", "attention_mask"}
    assert batch["input_ids"][0] == [TOKENIZER.pad_token_id, *TOKENIZER.encode("1")]
    assert batch["attention_mask"] == [[0, 1], [1, 1]]


def test_it_is_the_same_after_a_folder(tmp_path, model):
    TOKENIZER.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = CHARACTERS + "?é" + EOS + " . ,"
    assert tokenizer.encode(text) == TOKENIZER.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == TOKENIZER.decode(TOKENIZER.encode(text))
    assert tokenizer.padding_side == "left"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.float32
    assert loaded.generation_config.eos_token_id == TOKENIZER.eos_token_id
    for name, weight in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name


def test_the_model_is_small_and_ties_its_embeddings(model):
    assert 750_000 < model.num_parameters() < 850_000
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_seed_decides_the_weights(model):
    same, other = tiny_model(TOKENIZER, seed=1), tiny_model(TOKENIZER, seed=2)
    pairs = zip(model.parameters(), same.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert not torch.equal(model.lm_head.weight, other.lm_head.weight)


def test_the_global_random_stream_is_left_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    tiny_model(TOKENIZER, seed=5)
    assert torch.equal(torch.rand(3), expected)


def test_training_and_scoring_see_the_same_model(model):
    ids = torch.tensor([TOKENIZER.encode("47+38=85")])
    with torch.no_grad():
        scored = model.eval()(input_ids=ids).logits
        trained = model.train()(input_ids=ids).logits
    assert torch.equal(scored, trained)  # no dropout anywhere


def test_ends_and_padding_are_known_to_generation(model):
    for config in (model.config, model.generation_config):
        assert config.eos_token_id == TOKENIZER.eos_token_id
        assert config.pad_token_id == TOKENIZER.pad_token_id
        assert config.bos_token_id is None
