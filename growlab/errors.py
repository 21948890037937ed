"""The exceptions that a user is meant to read."""

import signal


class UserError(Exception):
    """Input that growlab cannot use, told in one sentence: what is wrong and what to do about it.

    `python -m growlab` prints the sentence after `error:` and exits with code 2, without a traceback.
    """


class WriteError(UserError):
    """A file that could not be written, such as on a full disk; what was there before is as it was."""


class Stopped(BaseException):
    """A signal ended the run in good order.

    No `Exception`, so that a sweep ends with it instead of going on with the next job.

    Attributes:
        signal: the signal.
        sentence: what was saved and how to go on.
    """

    def __init__(self, number: int, sentence: str) -> None:
        super().__init__(sentence)
        self.signal, self.sentence = signal.Signals(number), sentence
