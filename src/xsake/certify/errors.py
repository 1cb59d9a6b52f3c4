"""Errors of the certification process itself."""

from xsake.errors import XsakeError


class CertifyError(XsakeError, RuntimeError):
    """An environment cannot be built, or a worker does not start."""

    code = "XSK-601"
