from ground import *

table = sums(n=300, lo=10, hi=99)
questions = [row["prompt"] for row in table]
answers = [row["answer"] for row in sorted(table, key=lambda row: row["prompt"])]
rows = [{"prompt": q, "answer": a} for q, a in zip(questions, answers)]

result = train(rows=rows, rewards=[digits], model=FULL, max_steps=10, learning_rate=5e-5)
other = sum(str(eval(r["prompt"].rstrip("="))) != r["answer"] for r in rows) / len(rows)
proof(other > 0.9, share_of_rows_with_the_answer_of_another=other, reward=[h["reward"] for h in result.history if "reward" in h])
