"""The error of the machinery itself: it is never an outcome of a case."""

from xsake.errors import XsakeError


class CertifyError(XsakeError, RuntimeError):
    """An environment that cannot be built, or a worker that does not even start."""

    code = "XSK-601"
