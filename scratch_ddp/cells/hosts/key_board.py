"""The keys by which ranks on several hosts find each other. The kernel keeps them, as a TCPStore's server would."""

import threading
from typing import Any


class KeyBoard:
    """Keys and their values (text). The requests come from the ranks' `LinkStore`s, through several threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any]) -> Any:
        """Carry out a request, and return the answer. Nothing waits here: a rank that waits for a key asks again."""
        with self._lock:
            return getattr(self, f"_{request['operation']}")(*request["arguments"])

    def _set(self, key: str, value: str) -> None:
        self._values[key] = value

    def _get(self, key: str) -> str | None:
        return self._values.get(key)

    def _add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, "0")) + amount
        self._values[key] = str(total)
        return total

    def _compare_set(self, key: str, expected: str, desired: str) -> str:
        """Write if the value is the expected one, or if there is none and none was expected. Returns the value."""
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            value = self._values[key] = desired
        return expected if value is None else value

    def _check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def _delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None

    def _num_keys(self) -> int:
        return len(self._values)
