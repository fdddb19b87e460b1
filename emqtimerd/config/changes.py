"""What a reload changes."""

from dataclasses import dataclass

from emqtimerd.config.settings import Settings


@dataclass(frozen=True)
class Changes:
    """The difference between two settings, so that only what changed is touched."""

    sections: frozenset[str]
    added: frozenset[str]
    removed: frozenset[str]
    changed: frozenset[str]


def changes(old: Settings, new: Settings) -> Changes:
    """Top-level settings that differ, and listed queues that came, went or are swept otherwise."""
    before, after = set(old.queues), set(new.queues)
    return Changes(
        sections=frozenset(
            name for name in Settings.model_fields if getattr(old, name) != getattr(new, name)
        ),
        added=frozenset(after - before),
        removed=frozenset(before - after),
        changed=frozenset(q for q in before & after if old.for_queue(q) != new.for_queue(q)),
    )
