"""Rows of a table as one test."""

import inspect


def each_row(names, rows, *, ids=None):
    """`pytest.mark.parametrize` for rows that a test takes in one case: a failure names its row, the others still run.

    For cheap rows whose only difference is their value; fixtures of the function are made once for all of them, so
    none may be changed by a row.

    Args:
        names: the arguments that a row gives, separated by commas.
        rows: one value each, or one tuple where there are several names.
        ids: what a failure calls each row; its values otherwise.
    """
    arguments = [name.strip() for name in names.split(",")]
    listed = list(rows)
    called = [repr(row)[:80] for row in listed] if ids is None else list(ids)
    given = [
        dict(zip(arguments, row if len(arguments) > 1 else (row,), strict=True))
        for row in listed
    ]

    def decorated(test):
        signature = inspect.signature(test)
        fixtures = [p for p in signature.parameters.values() if p.name not in arguments]

        def run(subtests, **made):
            for called_so, row in zip(called, given, strict=True):
                with subtests.test(called_so):
                    test(**made, **row)

        own = inspect.Parameter("subtests", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = signature.replace(parameters=[own, *fixtures])  # type: ignore[attr-defined]
        run.__name__, run.__doc__, run.__module__ = (
            test.__name__,
            test.__doc__,
            test.__module__,
        )
        return run

    return decorated
