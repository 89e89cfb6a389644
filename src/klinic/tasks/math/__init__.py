"""Word problems of GSM8K's form, judged by the number they come to.

gsm8k.py     rows of GSM8K's form as chats
rewards.py   whether the number is right, by math-verify, and whether it is boxed
"""
