"""The history of every byte: what an access meets there, and what it leaves to later ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from ..machine.accesses import Touch
from ..machine.regions import Memory, Region
from .clocks import Clocks
from .encounter import Encounter
from .findings import AccessEvent
from .shadow import (
    CLEAN,
    FEW,
    PastAccess,
    Places,
    Shadow,
    Shadows,
    Span,
    State,
    States,
    after,
    distinct,
    each_place,
    made_now,
)

Meet = Callable[[Encounter, Iterable], None]  # lets these rules look at an encounter


class History:
    """The state of all memory. `forget` is called for memory that ended."""

    def __init__(
        self, memory: Memory, clocks: Clocks, forget: Callable[[int, int], None], meet: Meet
    ) -> None:
        self._memory, self._clocks, self._meet = memory, clocks, meet
        self._states = States()
        self.shadows = Shadows(memory, forget)

    def access(self, event: AccessEvent, touch: Touch) -> None:
        """Let an access that is made now meet what came before it, and add it to that."""
        addresses, size, region, _ = touch
        if addresses.size == 1:  # most accesses
            self._access_one(made_now(event), addresses.item(), touch)
        elif region is not None:
            self._access_tile(made_now(event), touch)
        elif addresses.size:  # a tile over several allocations
            flat = addresses.ravel()
            for lane, address in enumerate(flat.tolist()):
                held = self._memory.find(address, address + size)
                one = Touch(flat[lane : lane + 1], size, held)
                self._access_one(made_now(event), address, one)

    def states_of(self, shadow: Shadow) -> list[State]:
        return [self._states[number] for number in distinct(shadow.numbers)]

    def _access_one(self, past: PastAccess, address: int, touch: Touch) -> None:
        region = touch.region
        assert region is not None
        shadow = self._shadow(region)
        place = shadow.place(address, touch.size)
        if place < 0:
            self._access_tile(past, touch)
            return
        old = shadow.numbers.item(place)
        new = self._step(old, past, (region, shadow, slice(place, place + 1)), touch)
        if new != old:
            shadow.numbers[place] = new

    def _access_tile(self, past: PastAccess, touch: Touch) -> None:
        region = touch.region
        assert region is not None
        shadow = self._shadow(region)
        places = shadow.places(touch.addresses, touch.size)
        numbers = shadow.numbers[places]
        if numbers.size <= FEW:
            self._access_few(past, touch, shadow, places, numbers.tolist())
            return
        first = int(numbers[0])
        if np.count_nonzero(numbers == first) == numbers.size:
            shadow.numbers[places] = self._step(first, past, (region, shadow, places), touch)
            return
        if isinstance(places, slice):
            places = np.arange(places.start, places.stop)
        after_it = np.empty_like(numbers)
        for number in distinct(numbers):
            here = numbers == number
            after_it[here] = self._step(number, past, (region, shadow, places[here]), touch)
        shadow.numbers[places] = after_it

    def _access_few(
        self, past: PastAccess, touch: Touch, shadow: Shadow, places: Places, numbers: list[int]
    ) -> None:
        """Do the same for a few granules, by hand: numpy takes longer to begin."""
        assert touch.region is not None
        groups: dict[int, list[int]] = {}
        for place, number in zip(each_place(places), numbers, strict=True):
            groups.setdefault(number, []).append(place)
        for number in sorted(groups):
            group = groups[number]
            new = self._step(number, past, (touch.region, shadow, group), touch)
            if new != number:
                for place in group:
                    shadow.numbers[place] = new

    def _step(self, number: int, past: PastAccess, span: Span, touch: Touch) -> int:
        """Let the rules look at one access; return what the state of these bytes becomes."""
        state, event = self._states[number], past.event
        if number != CLEAN or event.writes:
            known, plain = self._knows(event, state), self._states.plain[number]
            if looks := event.looks[known][plain]:
                self._meet(Encounter(event, state, self._clocks, span, touch), looks)
        new = after(self._clocks, state, past)
        return number if new is state else self._states.number(new)

    def _knows(self, event: AccessEvent, state: State) -> bool:
        """Return whether the actor knows of all that its access could race with."""
        actor, alike, knows = event.actor, event.alike, self._clocks.knows_all
        others = state.atomics
        if alike:  # atomics like it are atomic to it
            others = tuple([mark for mark in others if mark.event.alike != alike])
        if others and not knows(actor, others):
            return False
        if state.writes and not knows(actor, state.writes):
            return False
        return not (event.writes and state.reads) or knows(actor, state.reads)

    def write_down(self, event: AccessEvent, touch: Touch) -> bool:
        """Take a host's access to an ordinary tensor into its diary; False if others touched it."""
        return self.shadows.write_down(made_now(event), touch)

    def _shadow(self, region: Region) -> Shadow:
        """Return a region's shadow; what its host did to it alone comes first."""
        known = self.shadows.get(region.start)
        if known is not None and known.end == region.end:  # most: such memory has no diary
            return known
        if not self.shadows.has_diary(region):
            return self.shadows.of(region)
        diary, shadow = self.shadows.read_diary(region), self.shadows.of(region)
        for past, touch in diary.entries:
            places = shadow.places(touch.addresses, touch.size)
            found, which = np.unique(shadow.numbers[places], return_inverse=True)
            states = [after(self._clocks, self._states[n], past) for n in found.tolist()]
            new = np.array([self._states.number(state) for state in states], np.int32)
            shadow.numbers[places] = new[which]
        return shadow
