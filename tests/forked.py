"""Processes that start in milliseconds: forked from a server that imported torch, models and qkeel once."""

import gc
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

_IMPORTED_ONCE = (
    "qkeel.lab.execute",
    "qkeel.cli.watch",
    "qkeel.remedies",
    "qkeel.monitor.monitor",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
)


class _Process(ForkServerProcess):
    """Has the environment of what starts it; the server has that of the test that first needed one."""

    def __init__(self, *how, **more):
        super().__init__(*how, **more)
        self._environment = dict(os.environ)

    def run(self):
        os.environ.clear()
        os.environ.update(self._environment)
        super().run()


class _Context(ForkServerContext):
    Process = _Process


def forkserver():
    """The context that starts them; a test session has one server."""
    context = _Context()
    context.set_forkserver_preload(list(_IMPORTED_ONCE))
    return context


class Python:
    """`python words…` in a folder, without input, but for the time of the imports; a context that ends it.

    Args:
        words: a script and its arguments, or -m, a module and its arguments.
        folder: where it runs.
        environment: what it finds in its environment besides what this process has.
        at_interrupt: what it was started to do at Ctrl-C, signal.SIG_IGN as in the background of a shell.
    """

    def __init__(
        self,
        words,
        folder,
        *,
        environment=None,
        at_interrupt=signal.default_int_handler,
    ):
        self._words, self._said = list(words), Path(tempfile.mkdtemp())
        given = (
            tuple(words),
            str(folder),
            dict(environment or {}),
            str(self._said),
            at_interrupt,
        )
        self._process = forkserver().Process(target=_python, args=given)
        self._process.start()
        self.pid = self._process.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.join()
        shutil.rmtree(self._said)

    def wait_for(self, text, seconds=400):
        """Waits until it has printed this; an AssertionError when it has ended or this time is over before."""
        deadline = time.monotonic() + seconds
        while text not in self._read("out"):
            assert self.poll() is None, self._read("err")
            assert time.monotonic() < deadline, (
                f"{text!r} was not printed: {self._read('out')}"
            )
            time.sleep(0.01)

    def poll(self):
        """The exit code, if it has ended."""
        return self._process.exitcode

    def send_signal(self, sent):
        """Sends it a signal."""
        os.kill(self.pid, sent)

    def end(self, timeout=300):
        """Waits for its end; TimeoutExpired after these seconds."""
        self._process.join(timeout)
        code, out, err = self.poll(), self._read("out"), self._read("err")
        if code is None:
            raise subprocess.TimeoutExpired(self._words, timeout, out, err)
        return subprocess.CompletedProcess(self._words, code, out, err)

    def _read(self, stream):
        path = self._said / stream
        return (
            path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        )


def spawn(world, *acts, seconds=300, store=""):
    """Calls the functions one after another in each process of a group of gloo; what each process printed.

    All must end well in this time: a process that waits for ever is a failure.

    Args:
        world: how many processes.
        acts: functions of modules, or partials of them; all begin one together.
        seconds: how long the processes may take.
        store: where they meet, as `init_process_group` takes it; a file of their own otherwise.
    """
    deadline = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, str(rank)) for rank in range(world)]
        meet = store or f"file://{folder}/store"
        started = []
        for rank, path in enumerate(said):
            path.touch()
            given = (acts, rank, world, meet, str(path))
            started.append(forkserver().Process(target=_member, args=given))
            started[-1].start()
        try:
            for process in started:
                process.join(max(0.0, deadline - time.monotonic()))
            codes = [process.exitcode for process in started]
        finally:
            for process in started:
                process.kill()
                process.join()
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in said]
    assert codes == [0] * world, "\n".join(texts)
    return texts


def _member(acts, rank, world, store, said):
    import torch
    from torch import distributed

    _redirect((said, said))
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    distributed.init_process_group("gloo", store, limit, world, rank)
    for act in acts:
        act()
        print(getattr(act, "__name__", act), "ended", flush=True)
        if act is not acts[-1]:
            distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # gloo's threads go on where DistributedDataParallel or fully_shard was used. One that lets go of a tensor while
    # the interpreter ends aborts the process ("terminate called without an active exception").
    os._exit(0)


def python(words, folder, **how):
    """What a Python has said when it has ended; how: as of that."""
    with Python(words, folder, **how) as process:
        return process.end()


def _python(
    words,
    folder,
    environment,
    said,
    at_interrupt,
):
    signal.signal(signal.SIGINT, at_interrupt)
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    _run(words, (f"{said}/out", f"{said}/err"))


def _redirect(said):
    gc.freeze()  # what looks at all objects, as `qkeel watch` does, would copy the server's memory page by page
    for stream, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)


def _run(words, said):
    _redirect(said)
    if words[0] == "-m":
        sys.argv = list(words[1:])
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        runpy.run_path(words[0], run_name="__main__")
