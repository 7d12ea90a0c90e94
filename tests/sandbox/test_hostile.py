"""Sixty hostile programs: none escapes, the host lives, and each is counted."""

from __future__ import annotations

import math
import socket

import pytest

from lore_torchrl.sandbox import Limits, Program, ProgramError, ProgramSet, Sandbox

pytest.importorskip("pydantic_monty")

VIEW = {"view": [["empty", "wall"], ["you", "goal"]], "carrying": "nothing"}
LIMITS = Limits(time_s=0.03, memory=4 << 20, recursion=50, output=1000)
RETURN = "return {'a': 1.0}"

# What a function body tries; where it were let through, it would return a good result.
REFUSED_BODIES = {
    # files
    "open a file": "open('/etc/passwd').read()",
    "write a file": "open('CANARY', 'w').write('x')",
    "pathlib read": "import pathlib\n    pathlib.Path('/etc/passwd').read_text()",
    "pathlib write": "import pathlib\n    pathlib.Path('CANARY').write_text('x')",
    "list a folder": "import os\n    os.listdir('/')",
    "remove a file": "import os\n    os.remove('CANARY')",
    "make a folder": "import os\n    os.mkdir('CANARY')",
    "io": "import io\n    io.open('/etc/passwd').read()",
    "tempfile": "import tempfile\n    tempfile.mkstemp()",
    "shutil": "import shutil\n    shutil.rmtree('CANARY')",
    # network and processes
    "socket": "import socket\n    socket.create_connection(('127.0.0.1', PORT))",
    "urllib": "import urllib.request\n    urllib.request.urlopen('http://127.0.0.1:PORT')",
    "http": "import http.client\n    http.client.HTTPConnection('127.0.0.1', PORT).connect()",
    "requests": "import requests\n    requests.get('http://127.0.0.1:PORT')",
    "system": "import os\n    os.system('touch CANARY')",
    "popen": "import os\n    os.popen('touch CANARY').read()",
    "subprocess": "import subprocess\n    subprocess.run(['touch', 'CANARY'])",
    "fork": "import os\n    os.fork()",
    "kill": "import os, signal\n    os.kill(os.getppid(), signal.SIGKILL)",
    "exit": "import os\n    os._exit(3)",
    "threads": "import threading\n    threading.Thread(target=print).start()",
    # imports and interpreter
    "__import__": "__import__('os').system('touch CANARY')",
    "importlib": "import importlib\n    importlib.import_module('os').system('touch CANARY')",
    "ctypes": "import ctypes\n    ctypes.string_at(0)",
    "pickle": "import pickle\n    pickle.loads(b\"cos\\nsystem\\n(S'touch CANARY'\\ntR.\")",
    "exec imports": "exec('import socket')",
    "eval imports": "eval(\"__import__('os').system('touch CANARY')\")",
    "compile": "compile('1', 'x', 'exec')",
    "the package": "import lore_torchrl",
    "torch": "import torch",
    "gc": "import gc\n    gc.get_objects()",
    "inspect": "import inspect\n    inspect.currentframe().f_back",
    "sys modules": "import sys\n    sys.modules['os']",
    "frames": "import sys\n    sys._getframe(1)",
    "breakpoint": "breakpoint()",
    "input": "input()",
    # walks over attributes
    "subclasses": "().__class__.__bases__[0].__subclasses__()",
    "globals": "compute_features.__globals__['x']",
    "code": "compute_features.__code__.co_consts",
    "builtins": "__builtins__['open']",
    "obs class": "obs.__class__.__mro__[1].__subclasses__()",
    "mro of a str": "''.__class__.mro()[1]",
    "format walk": "('{0.__class__.__init__.__globals__}').format(obs)",
    "unicode walk": "obs.__ｃｌａｓｓ__",
    "unicode name": "ｏpen('/etc/passwd').read()",
    "getattr": "getattr(obs, '__cla' + 'ss__').__mro__",
    # time, memory, depth, output
    "endless loop": "while True: pass",
    "caught endless loop": "try:\n        while True: pass\n    except BaseException: pass",
    "long sleep": "import time\n    while True: time.sleep(1)",
    "list bomb": "x = [0] * 10**9",
    "doubling": "x = 'a'\n    while True: x = x + x",
    "power": "x = 9 ** 9 ** 9",
    "recursion": "compute_features(obs)",
    "huge output": "print('x' * 100_000)",
}
# What is returned instead of a dict from str to a finite float.
REFUSED_RESULTS = {
    "nan": "{'a': float('nan')}",
    "infinity": "{'a': float('-inf')}",
    "int of thousands of digits": "{'a': 10 ** 9000}",
    "keys that are no str": "{1: 1.0}",
    "too many": "{str(n): 1.0 for n in range(100_000)}",
    "billion laughs": "laugh()",
}
LAUGH = "def laugh():\n    x = []\n    for i in range(60): x = [x, x]\n    return {'a': x}\n"


def hostile(path, port) -> dict[str, str]:
    programs = {
        name: f"def compute_features(obs):\n    {body}\n    {RETURN}\n"
        for name, body in REFUSED_BODIES.items()
    }
    programs |= {
        name: f"{LAUGH}def compute_features(obs):\n    return {result}\n"
        for name, result in REFUSED_RESULTS.items()
    }
    return {
        name: code.replace("CANARY", str(path / "canary")).replace("PORT", str(port))
        for name, code in programs.items()
    }


def test_sixty_hostile_programs_are_refused_and_counted(tmp_path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        programs = hostile(tmp_path, server.getsockname()[1])
        assert len(programs) == 60
        let_through = []
        for name, code in programs.items():
            programs_used = ProgramSet([Program("features", code)], limits=LIMITS, max_failures=2)
            [used] = programs_used.used
            results = [programs_used.compute([used], VIEW) for _ in range(2)]
            if any(results) or used.failed != 2 or used.retired is None:
                let_through.append(name)
        assert not let_through
        # Without the hostile part the same program is let through.
        harmless = ProgramSet([Program("features", programs["nan"].replace("'nan'", "1"))])
        assert harmless.compute(harmless.used, VIEW)
        with pytest.raises(BlockingIOError):
            server.accept()
    assert not list(tmp_path.iterdir())
    assert "xxxx" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("len = lambda x: 99\nmax = min = None\ndef compute_features(obs):\n    " + RETURN, 1.0),
        ("n = [0]\ndef compute_features(obs):\n    n[0] += 1\n    return {'a': float(n[0])}", 1.0),
        ("def compute_features(obs):\n    obs.clear()\n    return {'a': len(obs) + 0.5}", 0.5),
        ("import random\ndef compute_features(obs):\n    return {'a': random.random()}", None),
        ("import time\ndef compute_features(obs):\n    return {'a': time.time() % 7}", None),
    ],
    ids=["redefined builtins", "kept state", "changed view", "random numbers", "the clock"],
)
def test_nothing_lasts_beyond_a_run(code, expected):
    sandbox = ProgramSet([Program("features", code)], limits=LIMITS).sandbox
    before = repr(VIEW)
    first, second = (sandbox.run(Program("features", code), VIEW)["a"] for _ in range(2))
    assert first == second and math.isfinite(first)
    assert expected is None or first == expected
    after = Program("features", "def compute_features(obs):\n    return {'a': len('four') + 0.0}")
    assert sandbox.run(after, VIEW) == {"a": 4.0} and repr(VIEW) == before


NEST = "def nest():\n    x = (0,)\n    for i in range(40): x = (x, x)\n    return x\n"


@pytest.mark.parametrize(
    "body",
    [
        "return {nest(): 1.0}",
        "return {'a': {nest()}}",
        "return {'a': {nest(): 1.0}}",
        "global type, _json\n    type = _json = lambda x: dict\n    return {nest(): 1.0}",
        "global type\n    type = lambda x: None\n    return {'a': 1.0}",
        "global _json\n    _json = 1\n    return '[[[['",
    ],
    ids=["a key", "a set", "a key below", "redefined", "redefined type", "no JSON"],
)
def test_a_result_that_takes_forever_to_hash_costs_the_program_alone(body):
    program = Program("features", f"{NEST}def compute_features(obs):\n    {body}\n")
    with pytest.raises(ProgramError):
        Sandbox(LIMITS).run(program, VIEW)


def test_a_long_result_is_not_read():
    code = "def compute_features(obs):\n    return {'a': [[]] * 1000}"
    with pytest.raises(ProgramError) as error:
        Sandbox(LIMITS).run(Program("features", code), VIEW)
    assert error.value.kind == "memory"


@pytest.mark.parametrize("last", ["return {nest(): 1.0}", "if True:\n    return {nest()}"])
def test_what_a_program_returns_outside_of_functions_is_never_read(last):
    code = f"{NEST}def compute_features(obs):\n    return {{'a': 1.0}}\n{last}"
    with pytest.raises(ProgramError, match="compute_features is not called"):
        Sandbox(LIMITS).run(Program("features", code), VIEW)


def test_what_a_program_prints_is_not_its_result():
    code = "def compute_features(obs):\n    print('[1]', end='')\n    return {'a': 1.0}"
    assert Sandbox(LIMITS).run(Program("features", code), VIEW) == {"a": 1.0}
