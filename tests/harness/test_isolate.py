"""Foreign code in a child process: whatever it does is a result with a class and a name, and the sweep goes on."""

from dataclasses import replace

import pytest
import torch

from harness import bands, process_state
from harness.isolate import of_error
from harness.problem import Problem
from harness.runner import Runner
from harness.subject import load_subject

PROBLEM = Problem(entry="chunk", lengths=(5,), K=4, V=4, k="unit", v="gauss", g="mild", beta="uniform")
ROUTE = "chunk-unbounded"
WIDE = replace(PROBLEM, lengths=(64,), V=128)  # an o of 32 KiB
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ALLOWED = 2**29  # bytes for the calls of a child


@pytest.fixture
def run(tmp_path):
    runners = []

    def check(subject: str, problem: Problem = PROBLEM, device: str = "cpu", **how: object):
        if not runners:
            loaded = load_subject(f"tests.harness.subjects:{subject}")
            runners.append(Runner(loaded, device, tmp_path, timeouts=(60.0, 60.0), memory_bytes=ALLOWED))
        return runners[0].check(ROUTE, problem, **how).verdicts

    yield check
    for runner in runners:
        runner.close()


def classes(verdicts):
    return {verdict.quantity: verdict.klass for verdict in verdicts}


def test_a_right_subject_is_ok(run, tmp_path):
    verdicts = run("right")
    assert set(classes(verdicts).values()) == {"OK"}
    assert {"o", "ht", "dq", "dk", "dv", "dg", "dbeta"} <= set(classes(verdicts))
    assert list((tmp_path / "inflight").iterdir()) == []


def test_a_wrong_subject_is_a_bug(run):
    assert classes(run("wrong"))["o"] == "BUG"


def test_a_crash_is_a_result_and_the_problem_stays_on_disk(run, tmp_path):
    two_heads = Problem(**{**vars(PROBLEM), "heads": 2})
    assert classes(run("segfault_on_two_heads"))["o"] == "OK"
    (crash,) = run("segfault_on_two_heads", two_heads)
    assert (crash.klass, "SIGSEGV" in crash.message) == ("CRASH", True)
    (left,) = (tmp_path / "inflight").iterdir()
    assert Problem.load(left) == two_heads
    assert classes(run("segfault_on_two_heads"))["o"] == "OK"


def test_a_hang_is_a_result(tmp_path):
    subject = load_subject("tests.harness.subjects:hang")
    runner = Runner(subject, "cpu", tmp_path, timeouts=(12.0, 1.0))
    try:
        (verdict,) = runner.check(ROUTE, PROBLEM).verdicts
    finally:
        runner.close()
    assert (verdict.klass, "no answer within" in verdict.message) == ("HANG", True)


def test_randomness_has_its_own_class(run):
    assert "NONDETERMINISTIC" in {v.klass for v in run("random", repeat=True)}


def test_a_changed_input_is_a_bug(run):
    changed = [v for v in run("vandal") if v.quantity == "inputs"]
    assert [(v.klass, v.message) for v in changed] == [("BUG", "the call changed its argument v")]


def offences(verdicts):
    """What a subject with right numbers did otherwise."""
    return [(v.quantity, v.klass, v.statistic, v.message) for v in verdicts if v.klass != "OK"]


def test_an_abort_is_a_crash(run):
    (crash,) = run("abort")
    assert (crash.klass, crash.statistic, "SIGABRT" in crash.message) == ("CRASH", "crash", True)


@pytest.mark.parametrize(
    "subject, asked", [("greedy", str(2**52)), ("hungry", str(2**22))], ids=["in_one_piece", "by_and_by"]
)
def test_too_much_memory_is_a_crash_that_says_how_much(run, subject, asked):
    (crash,) = run(subject)
    assert (crash.klass, crash.statistic) == ("CRASH", "out_of_memory")
    assert crash.message.startswith(f"out of memory, {asked} bytes asked for, 512 MiB allowed: ")


@pytest.mark.parametrize(
    "said, lost, status, head",
    [
        (
            "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has",
            False,
            "out_of_memory",
            "20.00 GiB asked",
        ),
        ("MemoryError: ", False, "out_of_memory", "not known how much"),
        ("RuntimeError: std::bad_alloc", False, "out_of_memory", "not known how much"),
        ("AcceleratorError: CUDA error: an illegal memory access", True, "illegal_access", "the CUDA context is lost"),
        ("RuntimeError: invalid configuration", False, "crash", "RuntimeError"),
    ],
    ids=["gpu", "python", "c++", "illegal_access", "any"],
)
def test_errors_have_names(said, lost, status, head):
    outcome = of_error(said, "where it was", 2**30, lost)
    assert (outcome.status, head in outcome.message.splitlines()[0]) == (status, True)
    assert said in outcome.message and outcome.message.endswith("where it was")


def test_memory_that_each_call_keeps_is_a_bug(run):
    ((*what, message),) = offences(run("hoards", WIDE, repeat=True, only=""))
    assert what == ["memory", "BUG", "leak"]
    kept = int(message.rpartition(", ")[2].split()[0])
    assert message.startswith("each of 12 calls") and 2**15 <= kept < 2**15 + 1024


@pytest.mark.parametrize("subject", ["right", "caches"])
def test_memory_kept_once_is_no_leak(run, subject):
    assert offences(run(subject, WIDE, repeat=True, only="")) == []


def test_a_changed_process_is_a_bug_and_put_right(run):
    for _ in range(2):  # the second call is made in the same process
        ((*what, message),) = offences(run("untidy"))
        assert what == ["process", "BUG", "device_state"]
        assert "default dtype is torch.float64 after the call, and was torch.float32 before it" in message
        assert "deterministic algorithms" in message and "fp32 products of matmul is tf32" in message


def test_one_element_behind_an_argument_is_a_bug(run):
    assert offences(run("overruns")) == [
        ("bands", "BUG", "guard_band", "the call wrote 4 bytes behind argument v, the first 0 bytes away")
    ]


def test_elements_between_those_of_an_argument_are_not_the_calls(run):
    assert offences(run("writes_into_gaps")) == []
    ((*what, message),) = offences(run("writes_into_gaps", forms=("strided",)))
    assert what == ["bands", "BUG", "strided"]
    assert message.endswith("the call wrote 40 bytes between the elements of argument q")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64], ids=str)
def test_what_is_read_beside_a_tensor_is_nan(dtype):
    x = torch.arange(12).to(dtype).view(3, 4)
    banded = bands.embed("x", x[:, 1:3])
    assert torch.equal(banded.tensor, x[:, 1:3]) and banded.tensor.stride() == (4, 1)
    for band in banded.bands():
        beside = band.view(dtype)
        assert bool((beside.isnan() if dtype.is_floating_point else beside == -1).all())
    assert bands.touched([banded]) == []
    banded.tensor[0, 0] = 9
    assert [one.name for one in bands.touched([banded])] == ["x"]
    assert (banded.modified(), banded.overrun()) == (True, None)


def test_settings_are_put_back_after_an_error_too():
    with pytest.raises(RuntimeError, match="inside"), process_state.watched(torch.device("cpu")) as state:
        torch.set_grad_enabled(False)
        torch.set_num_threads(torch.get_num_threads() + 1)
        raise RuntimeError("inside")
    assert torch.is_grad_enabled()
    assert [line.partition(" is ")[0] for line in state.changes] == ["grad mode", "number of threads"]
    with process_state.watched(torch.device("cpu")) as state:
        torch.manual_seed(3)
    assert state.changes == []


@needs_gpu
@pytest.mark.parametrize(
    "subject, what, said",
    [
        ("hoards", ("memory", "BUG", "leak"), "32768 bytes a call"),
        ("greedy", ("call", "CRASH", "out_of_memory"), "GiB asked for, 512 MiB allowed"),
        ("other_stream", ("process", "BUG", "device_state"), "current stream is "),
        ("overruns", ("bands", "BUG", "guard_band"), "wrote 4 bytes behind argument v, the first 0 bytes away"),
    ],
    ids=["leak", "memory", "stream", "bands"],
)
def test_on_a_gpu_too(run, subject, what, said):
    ((*found, message),) = offences(run(subject, WIDE, "cuda", repeat=True, only=""))
    assert (tuple(found), said in message) == (what, True), message


@needs_gpu
def test_a_lost_context_is_a_crash_and_the_next_call_has_another(run):
    assert offences(run("illegal_on_two_heads", PROBLEM, "cuda", only="")) == []
    (lost,) = run("illegal_on_two_heads", replace(PROBLEM, heads=2), "cuda")
    assert (lost.klass, lost.statistic) == ("CRASH", "illegal_access")
    assert lost.message.startswith("the CUDA context is lost: ")
    assert offences(run("illegal_on_two_heads", PROBLEM, "cuda", only="")) == []
