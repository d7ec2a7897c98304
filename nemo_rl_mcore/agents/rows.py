"""From the calls of a session to the rows that are trained on.

A call whose prompt begins with all tokens of a row, sampled ones included, goes on with it; any other one begins a row,
with its whole prompt as context. So each sampled token is in one row, after the tokens that it was sampled after,
whatever a harness edits, compacts, retries or asks at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from nemo_rl_mcore.agents.session import Call, Session
from nemo_rl_mcore.data.messages import Message
from nemo_rl_mcore.data.token_digests import digest_of_ids
from nemo_rl_mcore.data.tokenizer import Tokenizer
from nemo_rl_mcore.data.turns import Ending, Reply, Turn
from nemo_rl_mcore.driver.rollouts.transcript import Piece, Transcript


def in_order(calls: Sequence[Call]) -> list[Call]:
    """Return calls in an order that does not depend on which of those made at the same time was answered first.

    One that goes on with another has the longer prompt, and comes after it.
    """
    return sorted(calls, key=lambda call: (len(call.prompt_P), digest_of_ids(call.prompt_P), call.repetition))


def chains_of(calls: Sequence[Call]) -> list[list[Call]]:
    """Return the calls of each row, in order."""
    chains: list[list[Call]] = []
    for call in calls:
        fitting = (chain for chain in chains if _goes_on(chain[-1], call))
        chain = max(
            fitting, key=lambda chain: len(chain[-1].prompt_P) + len(chain[-1].answer_N), default=None
        )
        if chain is None:
            chains.append([call])
        else:
            chain.append(call)
    return chains


def _goes_on(last: Call, call: Call) -> bool:
    shown, length = len(last.prompt_P), len(last.prompt_P) + len(last.answer_N)
    return (
        length <= len(call.prompt_P)
        and np.array_equal(call.prompt_P[:shown], last.prompt_P)
        and np.array_equal(call.prompt_P[shown:length], last.answer_N)
    )


def _pieces(chain: Sequence[Call], turns: Mapping[Call, int]) -> list[Piece]:
    pieces, shown = list[Piece](), 0
    for call in chain:
        versions = -1 if call.versions_N is None else call.versions_N
        pieces += [
            Piece(call.prompt_P[shown:]),
            Piece(call.answer_N, turns[call], call.logprobs_N, versions),
        ]
        shown = len(call.prompt_P) + len(call.answer_N)
    return pieces


def last_turn(session: Session, tokenizer: Tokenizer) -> Turn:
    """Return the conversation that ends with the session's last answer, for who scores it."""
    calls, last = in_order(session.calls), session.last
    assert last is not None
    [chain] = [chain for chain in chains_of(calls) if last in chain]
    messages: list[Message] = []
    for call in chain[: chain.index(last) + 1]:
        messages += [*call.heard, Message("assistant", tokenizer.decode(call.answer_N.tolist()))]
    return Turn(session.prompt, tuple(messages), last.finished)


def transcript_of(session: Session, reply: Reply, ending: Ending, shown: Sequence[int]) -> Transcript:
    """Return what a session leaves behind. shown: ids of a prompt, of one that has made no call.

    reply: with the reward of the whole session, which its last call gets.
    """
    calls = in_order(session.calls)
    turns = {call: turn for turn, call in enumerate(calls, start=1)}
    episode = Transcript(
        session.prompt.index,
        session.sample,
        [_pieces(chain, turns) for chain in chains_of(calls)]
        or [[Piece(np.array([*shown], dtype=np.int64))]],
        digests=[call.digest if len(call.answer_N) else 0 for call in calls],
        finished=session.last is not None and session.last.finished,
        ending=ending,
    )
    for following in calls[1:]:
        episode.take(Reply(0.0, terminated=False, observation=following.heard))
    episode.take(reply)
    return episode
