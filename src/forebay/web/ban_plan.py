"""A plan around another: it denies banned keys, and counts the denials of the other."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.web.bans import Ban
from forebay.web.client import UnknownPeer
from forebay.web.denials import by_ban
from forebay.web.fastpath import Passage
from forebay.web.functions import ResolvedRequest, has_to_be_awaited
from forebay.web.header_fields import Policy
from forebay.web.plan import Plan
from forebay.web.request import Request
from forebay.web.rules import Denial, Rule

__all__ = ["BanPlan"]


class BanPlan:
    """As `plan`, which is for `rules`, except for banned keys. A banned key is charged by none of the rules.

    A ban is of a client's key: it counts preflights, and denies them, as the client's other requests.
    """

    def __init__(self, plan: Plan, rules: Sequence[Rule]) -> None:
        self._plan = plan
        self._bans: list[tuple[Rule, Ban, str]] = [
            (rule, rule.ban, Policy(rule.limiter).name) for rule in rules if rule.ban is not None
        ]
        """With the name by which denials name the rule's limiter."""
        keys = [rule.key or plan.client for rule, _, _ in self._bans]
        self._keys_to_await = [key for key in keys if has_to_be_awaited(key)]

    def admit(self, request: Request) -> Passage | Denial:
        """As the plan's."""
        try:
            return self._ban_of(request) or self._counted(request, self._plan.admit(request))
        except UnknownPeer as error:
            return self._plan.denials.for_error(error)

    async def admit_async(self, request: ResolvedRequest) -> Passage | Denial:
        """As the plan's."""
        try:
            await request.resolve(self._keys_to_await)
            return self._ban_of(request) or self._counted(request, await self._plan.admit_async(request))
        except UnknownPeer as error:
            return self._plan.denials.for_error(error)

    def _ban_of(self, request: Request) -> Denial | None:
        """The denial by the ban that lasts longest; None if no key is banned."""
        found = [(rule, ban, ban.peek(self._plan.client_key(rule, request))) for rule, ban, _ in self._bans]
        banned = [one for one in found if not one[2].allowed]
        return by_ban(*max(banned, key=lambda one: one[2].retry_after_ns)) if banned else None

    def _counted(self, request: Request, passage: Passage | Denial) -> Passage | Denial:
        if isinstance(passage, Denial):
            for rule, ban, name in self._bans:
                if name in passage.violated:
                    ban.count_denial(self._plan.client_key(rule, request))
        return passage
