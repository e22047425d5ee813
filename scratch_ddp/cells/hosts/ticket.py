"""The ticket that lets hosts join a notebook: where it listens, how to recognise it, the secret that it asks for."""

import re
import secrets
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ticket:
    """As text "10.0.0.5:43211/<fingerprint>/<secret>". Whoever holds it can run code in the notebook's ranks."""

    address: str
    port: int
    fingerprint: str  # of the certificate: SHA-256, base64 for URLs
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24), repr=False)

    def __str__(self) -> str:
        address = f"[{self.address}]" if ":" in self.address else self.address
        return f"{address}:{self.port}/{self.fingerprint}/{self.secret}"

    @classmethod
    def parse(cls, text: str) -> "Ticket":
        """Read a ticket. Raises ValueError, which says what is wrong."""
        found = re.fullmatch(r"(?:\[(.+)\]|([^\[\]/:]+)):(\d{1,5})/([\w-]{43})/([\w-]{32})", text.strip())
        if found is None:
            raise ValueError(
                "this is not a whole ticket. Copy the command that %dist_init has printed, from its first to its last "
                "character"
            )
        return cls(found[1] or found[2], int(found[3]), found[4], found[5])
