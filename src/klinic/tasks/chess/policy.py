"""Grades of an analysis of a position: structure, notation, legality, agreement."""

import chess

from klinic.rewards.levels import Grade
from klinic.tasks.chess.notation import (
    EVALUATION,
    MOVE,
    SECTIONS,
    found_sections,
    position_of,
    read_analysis,
)


def structure(completion: str) -> Grade:
    """Grade the three sections: each once, in order, with nothing after the last."""
    if read_analysis(completion) is not None:
        return Grade("whole", "all three sections are there")
    num = found_sections(completion)
    if num == 0:
        return Grade("malformed", "it does not begin with M:")
    return Grade("part", f"{num} of 3 sections are in place", share=(num - 1) / len(SECTIONS))


def parses(completion: str) -> Grade:
    """Grade the notation of moves and evaluations."""
    said = read_analysis(completion)
    if said is None:
        return Grade("malformed", "it does not have the three sections")
    if said.is_well_formed:
        return Grade("whole", "all moves and evaluations can be read")
    good = [MOVE.fullmatch(m) is not None for m in (*said.moves, said.best)]
    good += [EVALUATION.fullmatch(e) is not None for e in said.evaluations]
    good.append(len(said.moves) == len(said.evaluations))
    return Grade("part", f"{sum(good)} of {len(good)} parts", share=sum(good) / (len(good) + 1))


def legality(prompt: str, completion: str) -> Grade:
    """Grade the legality of the best move, then of the candidates."""
    said = read_analysis(completion)
    if said is None or not said.is_well_formed:
        return Grade("malformed", "it cannot be read as an analysis")
    legal = {move.uci() for move in chess.Board(position_of(prompt)).legal_moves}
    if said.best in legal and legal.issuperset(said.moves):
        return Grade("whole", f"{said.best} and all candidates are legal")
    num = sum(move in legal for move in said.moves)
    share = num / len(said.moves)
    reason = f"{num} of {len(said.moves)} candidates are legal"
    if said.best in legal:
        return Grade("legal", f"{said.best} is legal, and {reason}", share=share)
    return Grade("illegal", f"{said.best} is not legal, and {reason}", share=share)


def agreement(prompt: str, completion: str, answer: str) -> Grade:
    """Grade the best move against the engine's lines."""
    graded = legality(prompt, completion)
    said, engine = read_analysis(completion), read_analysis(answer)
    if graded.level == "malformed" or said is None or engine is None:
        return Grade("malformed", graded.reason)
    if graded.level == "illegal":
        return Grade("illegal", f"{said.best} is not legal")
    if said.best not in engine.moves:
        return Grade("legal", f"{said.best} is not one of the engine's moves")
    rank = engine.moves.index(said.best)
    if rank == 0:
        return Grade("whole", f"{said.best} is the engine's move")
    share = 1 - rank / len(engine.moves)
    return Grade("listed", f"{said.best} is the engine's move number {rank + 1}", share=share)


def is_legal(prompt: str, completion: str) -> bool:
    """Return whether the best move is legal."""
    return legality(prompt, completion).level in ("legal", "whole")


def best_move(completion: str) -> str | None:
    """Return the best move of an analysis, or None if it does not parse."""
    said = read_analysis(completion)
    return said.best if said is not None and said.is_well_formed else None
