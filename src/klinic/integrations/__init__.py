"""Integrations with other trainers, one package each: TRL."""
