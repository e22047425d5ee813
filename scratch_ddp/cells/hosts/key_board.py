"""The keys by which ranks on several hosts find each other. The kernel keeps them, as a TCPStore's server would."""

import threading
from collections.abc import Callable
from typing import Any

Answer = Callable[[Any], None]  # sends the answer to the rank that has asked


class KeyBoard:
    """Keys and their values (text). The requests come from the ranks' `LinkStore`s, through several threads."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._waiting: list[tuple[list[str], Answer]] = []
        self._lock = threading.Lock()

    def ask(self, request: dict[str, Any], answer: Answer) -> None:
        """Carry out a request. "get" and "wait" are answered when all their keys exist."""
        with self._lock:
            getattr(self, f"_{request['operation']}")(answer, *request["arguments"])

    def _set(self, answer: Answer, key: str, value: str) -> None:
        self._write(key, value)
        answer(None)

    def _add(self, answer: Answer, key: str, amount: int) -> None:
        total = int(self._values.get(key, "0")) + amount
        self._write(key, str(total))
        answer(total)

    def _compare_set(self, answer: Answer, key: str, expected: str, desired: str) -> None:
        """Write if the value is the expected one, or if there is none and none was expected. Answers with the value."""
        value = self._values.get(key)
        if value == expected or (value is None and not expected):
            self._write(key, desired)
            value = desired
        answer(expected if value is None else value)

    def _get(self, answer: Answer, key: str) -> None:
        self._wait(lambda _: answer(self._values[key]), [key])

    def _wait(self, answer: Answer, keys: list[str]) -> None:
        if all(key in self._values for key in keys):
            answer(None)
        else:
            self._waiting.append((keys, answer))

    def _check(self, answer: Answer, keys: list[str]) -> None:
        answer(all(key in self._values for key in keys))

    def _delete_key(self, answer: Answer, key: str) -> None:
        answer(self._values.pop(key, None) is not None)

    def _num_keys(self, answer: Answer) -> None:
        answer(len(self._values))

    def _write(self, key: str, value: str) -> None:
        self._values[key] = value
        waiting, self._waiting = self._waiting, []
        for keys, answer in waiting:
            self._wait(answer, keys)
