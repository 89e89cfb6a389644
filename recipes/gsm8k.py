"""GSM8K: rows as chats, and a reward that knows when two numbers are the same.

`correct` needs math-verify: pip install "klinic[math]". It parses what a model wrote, which can
take for ever: the recipe gives it a process of its own and ten seconds.
"""

INSTRUCTION = "Reason step by step, and put the final answer within \\boxed{}."


def row(row):
    """Return a question as a chat, with the number behind its worked solution."""
    messages = [
        {"role": "system", "content": INSTRUCTION},
        {"role": "user", "content": row["question"]},
    ]
    return {"prompt": messages, "answer": row["answer"].rpartition("####")[2].strip()}


def correct(completions, answer, **columns):
    """Return 1 where the boxed answer, or the last number, equals the right one."""
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError('math-verify is missing: pip install "klinic[math]"') from error

    # the process has a time limit of its own, so the library needs none
    right = [parse(f"${n.replace(',', '')}$", parsing_timeout=None) for n in answer]
    found = [parse(said(completion), parsing_timeout=None) for completion in completions]
    return [
        float(verify(gold, guess, timeout_seconds=None))
        for gold, guess in zip(right, found, strict=True)
    ]


def boxed(completions, **columns):
    """Return 1 where an answer is boxed at all: the format, worth little beside the answer."""
    return [float("\\boxed{" in said(completion)) for completion in completions]


def said(completion):
    """Return the text of the last turn."""
    return completion if isinstance(completion, str) else completion[-1]["content"]
