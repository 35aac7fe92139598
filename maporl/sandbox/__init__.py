"""Runs untrusted programs of data sets and models, each in a process that the kernel isolates.

:mod:`maporl.sandbox.sandbox` runs one program, with or without tests, and :mod:`maporl.sandbox.pool` many at once;
:mod:`maporl.sandbox.outcomes` says how one ended::

    from maporl.sandbox.sandbox import Limits, Sandbox

    with Sandbox(Limits(cpu_seconds=1)) as sandbox:
        sandbox.run("def f(): return 6 * 7", "f")  # Outcome(value=42, reason='ok')
        sandbox.run("import socket; socket.create_connection(('example.com', 80))", "")  # reason='error'

:mod:`maporl.sandbox.repeatable` says whether a program can give the same twice, and :mod:`maporl.sandbox.triplets`
makes questions of programs, their inputs and their outputs. It needs Linux with seccomp; bubblewrap is used where it
works. Nothing here imports torch.
"""
