"""The tables of the page about scale are those that the arithmetic makes."""

from bench.scale import DEVICE, PAGE, STEP, TABLES, written


def test_the_tables_are_made_by_the_arithmetic():
    page = PAGE.read_text()
    assert written(page) == page, "run python -m bench.scale"
    assert all(f"<!-- table: {name} -->" in page for name in TABLES)


def test_the_text_names_what_is_assumed():
    page = " ".join(PAGE.read_text().split())
    assert DEVICE.memory == 80e9
    assert "80 GB of memory" in page
    assert DEVICE.flops == 1e15
    assert DEVICE.utilization == 0.4
    assert "1e15 FLOP/s in bf16, of which 40% are reached" in page
    assert f"{DEVICE.flops_fp32:.1e}".replace("e+", "e") + " in fp32" in page
    assert f"{DEVICE.bandwidth / 1e12} TB/s" in page
    assert f"{8 * DEVICE.network / 1e9:.0f} Gb/s" in page
    assert f"{STEP.prompts} prompts x {STEP.group} completions" in page
    assert f"prompts of {STEP.prompt_length:,} tokens" in page
    assert f"completions of {STEP.completion_length:,}" in page
