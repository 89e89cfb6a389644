"""Integrations with other trainers, one package each: TRL and verl; files of others."""
