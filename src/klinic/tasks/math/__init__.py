"""Math word problems in the format of GSM8K.

gsm8k.py     converts GSM8K rows to chat prompts
rewards.py   correctness by math-verify, and a format reward
"""
