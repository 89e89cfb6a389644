"""Ray: processes of a run on one machine or many, kept alive. The only place that imports it."""
