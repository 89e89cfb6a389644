"""The steps that fix a run of TRL name settings that TRL has."""

import re
from inspect import signature

from trl import GRPOConfig, GRPOTrainer

from klinic.doctor.advice import STEPS


def test_steps_of_trl_name_only_settings_that_trl_has():
    known = {*GRPOConfig.__dataclass_fields__, *signature(GRPOTrainer).parameters}
    settings = {
        name
        for steps in STEPS["trl"].values()
        for step in steps
        for name in re.findall(r"`([a-z_]+)=", step)
    }
    assert settings - known <= {
        "lora_dropout",
        "do_sample",
        "generation_config",
        "attn_implementation",
        "kv_cache_dtype",
    }
