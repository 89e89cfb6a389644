"""Datasets: read rows, validate them, and batch them as prompts.

prompts.py       shuffled batches of prompts
dataset.py       raw rows of a file, folder or hub id, mapped and validated
text_rows.py     rows of JSON lines, JSON lists and CSV files
parquet_rows.py  rows of Parquet files
"""
