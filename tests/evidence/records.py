"""Records to test with: one that has every field, and any record at all."""

from dataclasses import fields, replace

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from klinic.evidence.facts import NON_FINITE
from klinic.evidence.record import ROW_FIELDS, TOKEN_FIELDS, StepRecord

REQUIRED = {"token_ids", "loss_mask", "group"}
FINISH = st.sampled_from(["stop", "length", ""])
FACT_NAMES = st.text(st.characters(codec="utf-8"), max_size=8)
FACT_VALUES = st.one_of(
    st.none(),
    st.floats(),
    st.integers(-(2**53), 2**53),
    st.text(st.characters(codec="utf-8"), max_size=8).filter(lambda s: s not in NON_FINITE),
)


def full_record(step=1, lengths=(3, 0, 2), seed=0):
    """Return a record in which every field was recorded."""
    random = np.random.default_rng(seed)
    offsets = np.cumsum([0, *lengths])
    num_rows, num_tokens = len(lengths), int(offsets[-1])

    def floats(size):
        return random.normal(size=size).astype(np.float32)

    logps = ("logp_sampler", "logp", "logp_old", "logp_ref")
    others = ("entropy", "kl_exact", "routing_mismatch")
    return StepRecord(
        step=step,
        row_offsets=offsets,
        group=np.arange(num_rows) // 2,
        prompt_index=np.arange(num_rows) + 40,
        sample=np.arange(num_rows) % 2,
        prompt_offsets=np.arange(num_rows + 1) * 2,
        prompt_ids=random.integers(0, 99, num_rows * 2),
        finish_reason=np.array((["stop", "length", ""] * num_rows)[:num_rows], "<U6"),
        reward=floats(num_rows),
        reward_parts={"accuracy": floats(num_rows), "length/short": floats(num_rows)},
        advantage=floats(num_rows),
        cached_tokens=random.integers(0, 2, num_rows),
        prompt_ids_match=np.ones(num_rows, bool),
        round_trip=random.random(num_rows) < 0.5,
        token_ids=random.integers(0, 99, num_tokens),
        loss_mask=random.random(num_tokens) < 0.5,
        emitted_by=random.integers(0, 3, num_tokens).astype(np.int8),
        **{name: -np.abs(floats(num_tokens)) for name in logps},
        **{name: floats(num_tokens) for name in others},
        rank=random.integers(0, 9, num_tokens),
        weight_version=np.zeros(num_tokens, np.int64),
        process=np.arange(num_rows) % 2,
        loss_denominator=np.full(num_rows, 5.0),
        logp_teacher=-np.abs(floats(num_tokens)),
        token_advantage=floats(num_tokens),
        facts={"kl_coef": 0.01, "learner_version": 0, "weights_published": "abc", "loss": None},
    )


@st.composite
def records(draw):
    """Return any record: any lengths, any fields left out, any numbers in the others."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=4))
    whole = full_record(step=draw(st.integers(0, 10**7)), lengths=tuple(lengths))
    changes = {}
    for name in (*TOKEN_FIELDS, *ROW_FIELDS):
        if name not in REQUIRED and draw(st.booleans()):
            changes[name] = None
        else:
            changes[name] = draw(_same_kind(getattr(whole, name)))
    if draw(st.booleans()):
        changes |= {"prompt_offsets": None, "prompt_ids": None}
    names = draw(st.lists(FACT_NAMES, max_size=2, unique=True))
    parts = {name: draw(_same_kind(whole.reward)) for name in names}
    facts = draw(st.dictionaries(FACT_NAMES, FACT_VALUES, max_size=4))
    return replace(whole, **changes, reward_parts=parts, facts=facts)


def _same_kind(array):
    if array.dtype.kind == "U":
        return hnp.arrays("<U6", array.shape, elements=FINISH)
    if array.dtype.kind == "f":
        return st.sampled_from([np.float16, np.float32, np.float64]).flatmap(
            lambda dtype: hnp.arrays(dtype, array.shape)
        )
    return hnp.arrays(array.dtype, array.shape)


def assert_same(found, expected):
    """Compare two records field by field; NaN equals NaN."""
    for field in fields(StepRecord):
        a, b = getattr(found, field.name), getattr(expected, field.name)
        if field.name in ("reward_parts", "facts"):
            assert set(a) == set(b), field.name
            for name in b:
                _assert_equal(a[name], b[name], f"{field.name} {name}")
        else:
            _assert_equal(a, b, field.name)


def _assert_equal(a, b, name):
    assert type(a) is type(b), name
    if isinstance(b, np.ndarray) and b.dtype.kind != "U":
        assert a.dtype == b.dtype, name
    np.testing.assert_array_equal(a, b, err_msg=name)
