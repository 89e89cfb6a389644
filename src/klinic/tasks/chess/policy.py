"""Grades of an analysis of a position: structure, notation, legality, agreement."""

import chess

from klinic.rewards.levels import Grade
from klinic.tasks.chess.notation import (
    EVALUATION,
    MOVE,
    SECTIONS,
    count_sections,
    position_of,
    read_analysis,
)


def structure(completion: str) -> Grade:
    """Grade the three sections: each once, in order, with nothing after the last."""
    if read_analysis(completion) is not None:
        return Grade("whole", "all three sections are there")
    num = count_sections(completion)
    if num == 0:
        return Grade("malformed", "it does not begin with M:")
    return Grade("part", f"{num} of 3 sections are in place", share=(num - 1) / len(SECTIONS))


def parses(completion: str) -> Grade:
    """Grade the notation of moves and evaluations."""
    analysis = read_analysis(completion)
    if analysis is None:
        return Grade("malformed", "it does not have the three sections")
    if analysis.is_well_formed:
        return Grade("whole", "all moves and evaluations can be read")
    good = [MOVE.fullmatch(m) is not None for m in (*analysis.moves, analysis.best)]
    good += [EVALUATION.fullmatch(e) is not None for e in analysis.evaluations]
    good.append(len(analysis.moves) == len(analysis.evaluations))
    return Grade("part", f"{sum(good)} of {len(good)} parts", share=sum(good) / (len(good) + 1))


def legality(prompt: str, completion: str) -> Grade:
    """Grade the legality of the best move, then of the candidates."""
    analysis = read_analysis(completion)
    if analysis is None or not analysis.is_well_formed:
        return Grade("malformed", "it cannot be read as an analysis")
    legal = {move.uci() for move in chess.Board(position_of(prompt)).legal_moves}
    if analysis.best in legal and legal.issuperset(analysis.moves):
        return Grade("whole", f"{analysis.best} and all candidates are legal")
    num = sum(move in legal for move in analysis.moves)
    share = num / len(analysis.moves)
    reason = f"{num} of {len(analysis.moves)} candidates are legal"
    if analysis.best in legal:
        return Grade("legal", f"{analysis.best} is legal, and {reason}", share=share)
    return Grade("illegal", f"{analysis.best} is not legal, and {reason}", share=share)


def agreement(prompt: str, completion: str, answer: str) -> Grade:
    """Grade the best move against the engine's lines."""
    graded = legality(prompt, completion)
    analysis, engine = read_analysis(completion), read_analysis(answer)
    if graded.level == "malformed" or analysis is None or engine is None:
        return Grade("malformed", graded.reason)
    if graded.level == "illegal":
        return Grade("illegal", f"{analysis.best} is not legal")
    if analysis.best not in engine.moves:
        return Grade("legal", f"{analysis.best} is not one of the engine's moves")
    rank = engine.moves.index(analysis.best)
    if rank == 0:
        return Grade("whole", f"{analysis.best} is the engine's move")
    share = 1 - rank / len(engine.moves)
    return Grade("listed", f"{analysis.best} is the engine's move number {rank + 1}", share=share)


def is_legal(prompt: str, completion: str) -> bool:
    """Return whether the best move is legal."""
    return legality(prompt, completion).level in ("legal", "whole")


def best_move(completion: str) -> str | None:
    """Return the best move of an analysis, or None if it does not parse."""
    analysis = read_analysis(completion)
    return analysis.best if analysis is not None and analysis.is_well_formed else None
