"""klinic trains language models with GRPO and a KL term that is proven right."""

__version__ = "0.1.0.dev0"
