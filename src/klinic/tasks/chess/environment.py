"""Grades of a predicted next position: structure, notation, legality, agreement."""

import chess

from klinic.rewards.levels import Grade
from klinic.tasks.chess.notation import (
    NUM_FIELDS,
    num_well_formed,
    read_fields,
    read_outcome,
)


def structure(completion: str) -> Grade:
    """Grade the number of fields."""
    num = len(read_fields(completion))
    if num == NUM_FIELDS:
        return Grade("whole", "all four fields are there")
    if num == 1:
        return Grade("malformed", "it has no fields")
    # extra fields cost as much as missing ones
    share = max(0.0, 1 - abs(NUM_FIELDS - num) / NUM_FIELDS) * (NUM_FIELDS - 1) / NUM_FIELDS
    return Grade("part", f"{num} fields in place of {NUM_FIELDS}", share=share)


def parses(completion: str) -> Grade:
    """Grade the notation of the fields."""
    fields = read_fields(completion)
    if len(fields) != NUM_FIELDS:
        return Grade("malformed", "it does not have four fields")
    num = num_well_formed(fields)
    if num == NUM_FIELDS:
        return Grade("whole", "all four fields can be read")
    return Grade("part", f"{num} of {NUM_FIELDS} fields can be read", share=num / NUM_FIELDS)


def legality(prompt: str, completion: str) -> Grade:  # noqa: ARG001 - same signature as in policy.py
    """Grade the validity of the position."""
    outcome = read_outcome(completion)
    if outcome is None:
        return Grade("malformed", "it cannot be read as an outcome")
    try:
        board = chess.Board(outcome.position)
    except ValueError:
        return Grade("illegal", "its position does not have 8 x 8 squares")
    if board.is_valid():
        return Grade("whole", "its position can occur")
    return Grade("illegal", "its position cannot occur", share=0.5)


def agreement(prompt: str, completion: str, answer: str) -> Grade:
    """Grade the outcome against the correct one."""
    graded = legality(prompt, completion)
    predicted, right = read_outcome(completion), read_outcome(answer)
    if predicted is None or right is None:
        return Grade("malformed", graded.reason)
    if predicted == right:
        return Grade("whole", "it is the correct outcome")
    if graded.level == "illegal":
        return Grade("illegal", graded.reason)
    here, there = chess.Board(predicted.position), chess.Board(right.position)
    same = sum(here.piece_at(square) == there.piece_at(square) for square in chess.SQUARES)
    reason = f"{same} of 64 squares are right"
    # one move leaves most squares unchanged: only the last eight count
    return Grade("listed", reason, share=max(0.0, (same - 56) / 9))


def is_legal(prompt: str, completion: str) -> bool:
    """Return whether the position is valid."""
    return legality(prompt, completion).level == "whole"
