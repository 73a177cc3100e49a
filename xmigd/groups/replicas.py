"""Which memory of a group's ranks is equal, and which is not any more though nothing has made it different. Pure.

It is given what the ranks' snapshots of a round have: the hash of each chunk, by address. The ranks stood at the same
place (decision 0052), so those that do the same hold the same there. Which ranks that are, and where, is not known: it
is learnt, for each address by itself.

Ranks whose chunk at an address is equal are a *class*. It is believed in after it has been equal while its content
changed, or for many rounds; zeros, and content that a rank has at several addresses, prove nothing. If then one rank of
a believed class differs from the others, which are still equal and the majority, it is *suspected*. If that is so at
the next round, too, it is a finding. Two ranks have no majority: that they differ has to last longer, and it is one of
them.

What programs do on purpose is no finding, and that comes before everything else. A rank is suspected only if it has
executed as many records that change memory as others of its class have since they were equal, with the same allocations
in that chunk; if no other rank holds what it holds; if it does not hold zeros; and if it is not most of what it has in
common with the others that differs at once. If one of these is not so, it leaves the class. If a suspected rank is
equal again, the address is one at which equality comes and goes: it takes twice as long until that is believed in.

Invariants: a rank is in one class of an address at most; a class has two ranks at least; who is found has left the
class, and is found again only after it has been equal again for as long as anybody.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

CHUNK = 2 << 20  # journal::kGranule
CHANGES = 3  # rounds in which a class was equal and had other content than before
CONSTANT = 12  # rounds in which it was equal and had the same content
OF_TWO = 3  # times as many of both, for a class of two
CONFIRMED, CONFIRMED_OF_TWO = 2, 5  # rounds in a row in which the same ranks differ
MOST_HEALED = 8  # times that a suspicion was wrong after which it does not take longer still
FEW = 4  # chunks of a rank that may differ whatever their share is
MOST_CHUNKS = 1 << 18  # of a group, by address


@dataclass(frozen=True, slots=True)
class Content:
    """What a rank's snapshot says of its device memory. In the order of addresses."""

    addresses: Sequence[int]
    hashes: Sequence[int]
    zeros: int | None  # the hash of a chunk of zeros, if there is one
    live: Sequence[int]  # allocations: address, bytes and context of each
    work: int | None  # records that it has executed that change memory; None: not known


@dataclass(frozen=True, slots=True)
class Finding:
    """Memory of a rank differs from that of others that had the same. `equal`: those that still have; none: there were
    two, and it is one of `suspects`."""

    suspects: tuple[str, ...]
    equal: tuple[str, ...]
    addresses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    chunks: int  # addresses that were compared
    watched: int  # those at which a class is believed in
    suspected: int  # those that the next round will decide on
    findings: tuple[Finding, ...]
    unlike: tuple[str, ...]  # ranks that have turned out not to do the same as others


@dataclass(slots=True, eq=False)
class _Class:
    ranks: tuple[int, ...]
    content: int
    changed: int = 0
    constant: int = 0
    healed: int = 0
    suspects: tuple[int, ...] = ()
    rounds: int = 0  # in a row, with these suspects

    @property
    def believed(self) -> bool:
        times = (OF_TWO if len(self.ranks) == 2 else 1) << self.healed
        return bool(self.suspects) or self.changed >= CHANGES * times or self.constant >= CONSTANT * times

    def leave(self, ranks: Iterable[int]) -> None:
        self.ranks = tuple(one for one in self.ranks if one not in ranks)
        self.suspects = tuple(one for one in self.suspects if one not in ranks)


Classes = list[_Class]


@dataclass(slots=True)
class _Look:
    """At one round."""

    contents: Sequence[Content]
    work: list[int | None]  # of each rank, since the last one
    suspected: list[tuple[int, _Class]] = field(default_factory=list)
    allocations: dict[int, Sequence[int]] = field(default_factory=dict)  # their addresses, by rank
    repeated: dict[int, set[int]] = field(default_factory=dict)  # by rank

    def is_plain(self, rank: int, content: int | None) -> bool:
        """Zeros, or what the rank has somewhere else, too: to have it as well proves nothing."""
        if rank not in self.repeated:
            counted = Counter(self.contents[rank].hashes)
            found = self.repeated[rank] = {one for one, times in counted.items() if times > 1}
            if (zeros := self.contents[rank].zeros) is not None:
                found.add(zeros)
        return content in self.repeated[rank]

    def does_the_same(self, rank: int, others: Sequence[int], address: int) -> bool:
        """As at least half of the others, as far as is known; with memory that is allocated alike."""
        work = self.work[rank]
        alike = [one for one in others if self.work[one] == work]
        if work is None or 2 * len(alike) < len(others):
            return False
        mine = self._allocated(rank, address)
        return bool(mine) and all(self._allocated(one, address) == mine for one in others)

    def _allocated(self, rank: int, address: int) -> list[tuple[int, int]]:
        """In a chunk."""
        live = self.contents[rank].live
        if rank not in self.allocations:
            self.allocations[rank] = live[0::3]
        at = max(0, bisect_left(self.allocations[rank], address + 1) - 1)
        found = []
        while 3 * at < len(live) and live[3 * at] < address + CHUNK:
            if live[3 * at] + live[3 * at + 1] > address:
                found.append((live[3 * at], live[3 * at + 1]))
            at += 1
        return found


class Replicas:
    """Of one group."""

    def __init__(self, members: Sequence[str]) -> None:
        self.members = tuple(members)
        self._classes: dict[int, Classes] = {}  # by address
        self._work: list[int | None] = [None] * len(members)

    def __len__(self) -> int:
        """Addresses of which something is known."""
        return len(self._classes)

    def watched(self, member: str) -> list[int]:
        """Addresses at which it is in a class that is believed in."""
        rank = self.members.index(member)
        return [
            address for address, classes in self._classes.items()
            if any(one.believed and rank in one.ranks for one in classes)
        ]  # fmt: skip

    def look(self, contents: Sequence[Content]) -> Seen:
        """At a round at which all stood at the same place; `contents` in the order of the members."""
        work = [
            None if now.work is None or last is None or now.work < last else now.work - last
            for now, last in zip(contents, self._work, strict=True)
        ]
        self._work = [one.work for one in contents]
        look = _Look(contents, work)
        before, after, count = self._classes, dict[int, Classes](), len(contents)
        chunks = 0
        for address, now in islice(_rows(contents), MOST_CHUNKS):
            chunks += 1
            classes = before.get(address)
            if classes is not None and len(classes[0].ranks) == count and now.count(now[0]) == count:
                self._equal(look, classes[0], now[0])  # mostly
            else:
                classes = self._compare(look, address, now, classes or [])
            if classes:
                after[address] = classes
        self._classes = after
        unlike = self._leave_who_is_unlike(look)
        findings = tuple(self._find(look))
        return Seen(
            chunks=chunks,
            watched=sum(1 for classes in after.values() if any(one.believed for one in classes)),
            suspected=sum(1 for _, one in look.suspected if one.suspects),
            findings=findings,
            unlike=tuple(self.members[one] for one in unlike),
        )

    # --- one address -------------------------------------------------------------------------------------------------

    def _compare(self, look: _Look, address: int, now: Sequence[int | None], classes: Classes) -> Classes:
        kept = [one for one in classes if self._holds(look, address, now, one)]
        inside = {rank for one in kept for rank in one.ranks}
        outside: dict[int, list[int]] = {}
        for rank, content in enumerate(now):
            if rank not in inside and content is not None:
                outside.setdefault(content, []).append(rank)
        if not outside:
            return kept
        for number, one in enumerate(kept):
            if not one.suspects and (joined := outside.pop(one.content, None)):
                kept[number] = _Class(tuple(sorted([*one.ranks, *joined])), one.content, healed=one.healed)
        for content, ranks in outside.items():
            if len(ranks) > 1 and not look.is_plain(ranks[0], content):
                kept.append(_Class(tuple(ranks), content))
        return kept

    def _equal(self, look: _Look, one: _Class, content: int | None) -> None:
        if content is None:
            return
        if one.suspects:
            one.suspects, one.healed = (), min(one.healed + 1, MOST_HEALED)
            one.changed = one.constant = 0
        if look.is_plain(one.ranks[0], content):
            pass
        elif content == one.content:
            one.constant += 1
        else:
            one.changed += 1
        one.content = content

    def _holds(self, look: _Look, address: int, now: Sequence[int | None], one: _Class) -> bool:
        """Is it a class still? With those of its ranks that belong to it."""
        one.leave([rank for rank in one.ranks if now[rank] is None])
        by_content: dict[int | None, list[int]] = {}
        for rank in one.ranks:
            by_content.setdefault(now[rank], []).append(rank)
        if len(one.ranks) < 2:
            return False
        if len(by_content) == 1:
            self._equal(look, one, now[one.ranks[0]])
            return True
        if not one.believed:
            return False
        equal, *others = sorted(by_content.values(), key=len, reverse=True)
        if len(one.ranks) == 2:
            return self._two_differ(look, address, now, one)
        if 2 * len(equal) <= len(one.ranks) or any(len(ranks) > 1 for ranks in others):
            return False
        differing = [ranks[0] for ranks in others]
        one.leave([rank for rank in differing if not self._may_be_wrong(look, address, now, rank, equal)])
        one.content = now[equal[0]] or 0
        differing = [rank for rank in differing if rank in one.ranks]
        if not differing:
            self._equal(look, one, one.content)
        else:
            self._suspect(look, address, one, tuple(sorted(differing)))
        return True

    def _two_differ(self, look: _Look, address: int, now: Sequence[int | None], one: _Class) -> bool:
        first, second = one.ranks
        if not self._may_be_wrong(look, address, now, first, [second]):
            return False
        self._suspect(look, address, one, one.ranks)
        return True

    @staticmethod
    def _may_be_wrong(
        look: _Look, address: int, now: Sequence[int | None], rank: int, others: Sequence[int]
    ) -> bool:  # fmt: skip
        """Than others, all of which hold the same."""
        plain = look.is_plain(rank, now[rank]) or look.is_plain(others[0], now[others[0]])
        return not plain and look.does_the_same(rank, others, address)

    @staticmethod
    def _suspect(look: _Look, address: int, one: _Class, ranks: tuple[int, ...]) -> None:
        one.rounds = one.rounds + 1 if one.suspects == ranks else 1
        one.suspects = ranks
        look.suspected.append((address, one))

    # --- all addresses -----------------------------------------------------------------------------------------------

    def _leave_who_is_unlike(self, look: _Look) -> list[int]:
        """Whose memory mostly differs at once does something else."""
        if not look.suspected:
            return []
        differing = Counter(rank for _, one in look.suspected for rank in one.suspects)
        believed = Counter(
            rank for classes in self._classes.values() for one in classes if one.believed for rank in one.ranks
        )
        unlike = sorted(rank for rank, many in differing.items() if many > FEW and 2 * many > believed[rank])
        if unlike:
            for address, one in look.suspected:
                one.leave(unlike)
                self._drop_if_alone(address, one)
        return unlike

    def _drop_if_alone(self, address: int, one: _Class) -> None:
        if len(one.ranks) < 2 and address in self._classes:
            left = [other for other in self._classes[address] if other is not one]
            if left:
                self._classes[address] = left
            else:
                del self._classes[address]

    def _find(self, look: _Look) -> Iterator[Finding]:
        found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for address, one in look.suspected:
            of_two = len(one.ranks) == 2 and one.suspects == one.ranks
            if not one.suspects or one.rounds < (CONFIRMED_OF_TWO if of_two else CONFIRMED):
                continue
            equal = tuple(rank for rank in one.ranks if rank not in one.suspects)
            for suspects in [one.suspects] if of_two else [(rank,) for rank in one.suspects]:
                found.setdefault((suspects, equal), []).append(address)
            one.leave(one.suspects)
            self._drop_if_alone(address, one)
        for (suspects, equal), addresses in found.items():
            yield Finding(self._named(suspects), self._named(equal), tuple(addresses))

    def _named(self, ranks: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.members[rank] for rank in ranks)


def _rows(contents: Sequence[Content]) -> Iterator[tuple[int, tuple[int | None, ...]]]:
    """Each address, with the hash that each rank has there; None: it has none."""
    first = contents[0].addresses
    if all(one.addresses == first for one in contents[1:]):
        return zip(first, zip(*(one.hashes for one in contents), strict=False), strict=False)
    tables = [dict(zip(one.addresses, one.hashes, strict=False)) for one in contents]
    every = dict.fromkeys(address for table in tables for address in table)
    return ((address, tuple(table.get(address) for table in tables)) for address in every)
