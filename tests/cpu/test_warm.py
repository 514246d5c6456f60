"""Warming: after it, no call of the deployment meets a signature that is new, in a capture least of all."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from denoisers import KernelGate, one_ulp_up
from gate_fakes import FakeProbe

from samebits import jit, tiny
from samebits.apply import Handle, apply
from samebits.certificate import folder_in, inspect, name_of
from samebits.cli import main
from samebits.environment import certified
from samebits.errors import ModelError
from samebits.gate import CAPTURING, COMPARED, State
from samebits.warming import DEFAULT_TOKENS, Call, Texts, Warmth, warm

QWEN, Z_IMAGE = "tiny-qwen-image", "tiny-z-image"
OFF = {QWEN: {"true_cfg_scale": 1.0}, Z_IMAGE: {"guidance_scale": 0.0}}
"""No guidance."""


@pytest.fixture(scope="module")
def pipelines() -> dict[str, Any]:
    """Built once: they are only run."""
    found = {name: tiny.build(name, torch.bfloat16) for name in tiny.NAMES}
    for pipeline in found.values():
        pipeline.set_progress_bar_config(disable=True)
    return found


@pytest.fixture
def applied(pipelines: dict[str, Any]) -> Any:
    """Apply to a pipeline, through a gate whose kernels are Python; taken off at the end."""
    handles: list[Handle] = []

    def put_on(name: str) -> tuple[Any, Handle, FakeProbe]:
        probe = FakeProbe()
        gate = KernelGate(probe=probe, made_up_elements=0)
        handles.append(apply(pipelines[name], gate=gate))
        return pipelines[name], handles[-1], probe

    yield put_on
    for handle in handles:
        handle.remove()


def reasons(handle: Handle) -> Counter[str]:
    total: Counter[str] = Counter()
    for line in handle.sites:
        if line.site is not None:
            total.update(line.site.counters.reasons)
    return total


def paint(pipeline: Any, name: str, texts: list[torch.Tensor], size: tuple[int, int] = (64, 64), **more: Any) -> Any:
    """What a server does: prompts of these lengths, through the pipeline's own padding and masks."""
    arguments: dict[str, Any] = {"width": size[0], "height": size[1], "num_inference_steps": 2, "output_type": "latent"}
    arguments |= {**OFF[name], "generator": torch.Generator().manual_seed(1), **more}
    if name == Z_IMAGE:
        return pipeline(prompt_embeds=[text.clone() for text in texts], **arguments).images
    longest = max(map(len, texts))
    rows = torch.stack([torch.nn.functional.pad(text, (0, 0, 0, longest - len(text))) for text in texts])
    mask = torch.tensor([[int(position < len(text)) for position in range(longest)] for text in texts])
    return pipeline(prompt_embeds=rows, prompt_embeds_mask=mask, **arguments).images


# What it is for


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_capture_after_it_meets_no_unknown_signature(applied: Any, name: str) -> None:
    pipeline, handle, probe = applied(name)
    outcome = warm(
        pipeline, handle, sizes=[(64, 64), (64, 96)], batches=[1, 2], tokens=[32, 40], arguments=dict(OFF[name])
    )
    assert outcome.good
    assert outcome.count(State.VERIFIED) > 20
    assert len(outcome.calls) == {QWEN: 8, Z_IMAGE: 9}[name], "and a mixture of lengths that sums up to another shape"
    text = Texts(pipeline).long(64)
    before = reasons(handle)
    probe.capturing_here = True
    for size in ((64, 64), (64, 96)):
        for lengths in ((32,), (40,), (40, 40), (32, 32), (40, 7), (9, 32)):
            paint(pipeline, name, [text[:length] for length in lengths], size)
    assert reasons(handle) == before, "every call went to a kernel"
    assert not handle.gate.pending
    # The control: what was not warmed is met by the capture, and nothing of it is fused.
    paint(pipeline, name, [text[:40]], (160, 160))
    assert reasons(handle)[CAPTURING] > 0
    assert handle.gate.pending


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_prompt_in_words_meets_nothing_new_either(applied: Any, name: str) -> None:
    """The rows that stand for prompts are laid out in memory as those that the encoder makes of words."""
    pipeline, handle, _ = applied(name)
    texts = Texts(pipeline)
    words = "a red fox in snow"
    length = len(texts.rows(words, DEFAULT_TOKENS))
    wanted = [-(-length // texts.padding) * texts.padding]
    negative = {"negative_prompt": "rain", **({"true_cfg_scale": 4.0} if name == QWEN else {"guidance_scale": 5.0})}
    warm(pipeline, handle, sizes=[(64, 64)], tokens=wanted, arguments=dict(OFF[name]))
    before = reasons(handle)
    size = {"width": 64, "height": 64, "num_inference_steps": 2, "output_type": "latent"}
    pipeline(prompt=words, **size, **OFF[name])
    assert reasons(handle)[COMPARED] == before[COMPARED]
    pipeline(prompt=words, **size, **negative)
    assert reasons(handle)[COMPARED] > before[COMPARED], "guidance has shapes of its own"
    warm(pipeline, handle, sizes=[(64, 64)], tokens=wanted, arguments=negative)
    before = reasons(handle)
    pipeline(prompt=words, **size, **negative)
    assert reasons(handle)[COMPARED] == before[COMPARED]


def test_a_table_is_closed_up_only_where_nobody_traces(pipelines: dict[str, Any]) -> None:
    """What diffusers cuts out of a longer table keeps its bits; a traced graph keeps diffusers' own lines."""
    from samebits.models.z_image import _closed_up

    whole = torch.arange(2 * 7 * 3, dtype=torch.float32).view(2, 7, 3)
    for cut in (whole[:, :4], whole[:1, :4]):
        closed = _closed_up(cut)
        assert closed.stride() == (12, 3, 1)
        assert torch.equal(closed, cut)
    assert _closed_up(whole) is whole
    assert _closed_up(whole[:1, :4]).data_ptr() == whole.data_ptr(), "one sample is not copied"
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        assert _closed_up(whole[:, :4]).stride() == (21, 3, 1)


def test_lengths_that_are_padded_to_one_share_their_signatures(applied: Any) -> None:
    pipeline, handle, _ = applied(Z_IMAGE)
    text = Texts(pipeline).long(65)
    warm(pipeline, handle, sizes=[(64, 64)], tokens=[64], arguments=dict(OFF[Z_IMAGE]))
    before = reasons(handle)
    for length in (33, 50, 63, 64):
        paint(pipeline, Z_IMAGE, [text[:length]])
    assert reasons(handle) == before
    paint(pipeline, Z_IMAGE, [text[:65]])
    assert reasons(handle) != before


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_default_lengths_are_all_that_have_shapes_of_their_own(pipelines: dict[str, Any], name: str) -> None:
    texts = Texts(pipelines[name])
    found = texts.lengths()
    shortest = len(texts.rows("", DEFAULT_TOKENS))
    assert found[-1] == DEFAULT_TOKENS
    if name == QWEN:
        assert found == list(range(shortest, 513))
        assert texts.most == 1024
    else:
        assert found == list(range(32, 513, 32))
        assert shortest <= 32
        assert texts.most == 992


def test_mixtures_reach_every_sum_of_padded_lengths(pipelines: dict[str, Any]) -> None:
    texts = Texts(pipelines[Z_IMAGE])
    found = texts.mixtures([32, 64, 100, 128], 3)  # 1, 2 and twice 4 units
    sums = [sum(-(-length // 32) for length in mixture) for mixture in found]
    assert sums == [4, 5, 7, 8, 9, 10], "3, 6 and 12 are sums of equal ones, 11 of none"
    assert all(len(mixture) == 3 for mixture in found)
    assert texts.mixtures([32, 64], 1) == []
    assert Texts(pipelines[QWEN]).mixtures([32, 64], 3) == []


@pytest.mark.parametrize("name", tiny.NAMES)
def test_a_text_has_exactly_the_length_that_was_asked_for(pipelines: dict[str, Any], name: str) -> None:
    texts = Texts(pipelines[name])
    for length in (1, 31, 32, 200, texts.most):
        assert len(texts.long(length)) == length
    with pytest.raises(ModelError, match=f"at most {texts.most} tokens, not {texts.most + 1}"):
        texts.long(texts.most + 1)


def test_a_combination_is_run_until_nothing_is_new(applied: Any) -> None:
    pipeline, handle, _ = applied(QWEN)
    told: list[tuple[Call, int, int]] = []
    arguments = dict(OFF[QWEN])
    first = warm(
        pipeline, handle, sizes=[(64, 64)], tokens=[5], arguments=arguments, watch=lambda *args: told.append(args)
    )
    assert first.runs == 2, "one that met everything, one that met nothing"
    assert told == [(Call(64, 64, (5,)), 1, 1)]
    again = warm(pipeline, handle, sizes=[(64, 64)], tokens=[5], arguments=arguments)
    assert again.runs == 1
    assert arguments == OFF[QWEN]


def test_a_combination_that_never_comes_to_rest_is_named(applied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, handle, _ = applied(QWEN)
    turn = iter(range(100))
    monkeypatch.setattr("samebits.warming._known", lambda handle: Counter({("op", State.VERIFIED): next(turn)}))
    outcome = warm(pipeline, handle, sizes=[(64, 64)], tokens=[5], arguments=dict(OFF[QWEN]))
    assert outcome.unsettled == [Call(64, 64, (5,))]
    assert not outcome.good


def test_more_signatures_than_the_gate_remembers_are_not_good(applied: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, handle, _ = applied(QWEN)
    arguments = {"sizes": [(64, 64)], "tokens": [5, 6], "arguments": dict(OFF[QWEN])}
    assert warm(pipeline, handle, **arguments).full == []
    monkeypatch.setattr("samebits.warming.SIGNATURE_LIMIT", 3)
    outcome = warm(pipeline, handle, **arguments)
    assert "qk_norm_rope" not in outcome.full
    assert "linear_gelu_tanh" in outcome.full
    assert not outcome.good


def test_what_was_done_before_an_interruption_is_known(applied: Any) -> None:
    pipeline, handle, _ = applied(QWEN)
    outcome = Warmth()

    def stop(call: Call, number: int, count: int) -> None:
        if number == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        warm(
            pipeline,
            handle,
            sizes=[(64, 64)],
            tokens=[5, 6, 7],
            arguments=dict(OFF[QWEN]),
            watch=stop,
            outcome=outcome,
        )
    assert outcome.calls == [Call(64, 64, (5,))]
    assert outcome.count(State.VERIFIED) > 5


@pytest.mark.parametrize(
    "wrong", [{"sizes": []}, {"batches": []}, {"batches": [0]}, {"tokens": []}, {"tokens": [0]}, {"steps": 0}]
)
def test_nothing_to_run_is_an_error(applied: Any, wrong: dict[str, Any]) -> None:
    pipeline, handle, _ = applied(QWEN)
    with pytest.raises(ValueError, match="each from 1 up"):
        warm(pipeline, handle, **({"sizes": [(64, 64)], "tokens": [5]} | wrong))


def test_another_pipeline_cannot_be_warmed() -> None:
    with pytest.raises(ModelError, match="expected a QwenImagePipeline or a ZImagePipeline"):
        Texts(object())


# The command


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAMEBITS_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def kept(cache: Path) -> dict[str, int]:
    """How many verdicts of each state this environment's certificate holds."""
    found = inspect(folder_in(cache))
    assert [one.name for one in found] in ([], [name_of(certified())])
    return dict(Counter(verdict.state for one in found for verdict in one.verdicts))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[KernelGate]]:
    """Let the command's gates have kernels written in Python, and return those gates."""

    def use(spoilt: str | None = None) -> list[KernelGate]:
        made: list[KernelGate] = []

        class Gate(KernelGate):
            def __init__(self) -> None:
                super().__init__(made_up_elements=0)
                made.append(self)

            def _kernel(self, op: Any) -> Any:
                right = super()._kernel(op)

                def wrong(*args: Any, out: Any = None) -> Any:
                    result = right(*args, out=out)
                    one_ulp_up(result if isinstance(result, torch.Tensor) else result[0], 0)
                    return result

                return wrong if op.name == spoilt else right

        monkeypatch.setattr("samebits.gate.Gate", Gate)
        return made

    return use


QUICK = ["--sizes", "64", "--tokens", "32"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["warm", *arguments])


@pytest.mark.parametrize("name", tiny.NAMES)
def test_all_verified_is_0(cache: Path, kernels: Callable[..., Any], name: str) -> None:
    kernels()
    done = run(name, "--sizes", "64,64x96", "--batch", "1,2", "--tokens", "32-64:32", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["good"] is True
    assert found["combinations"] == {QWEN: 8, Z_IMAGE: 9}[name]
    assert found["reasons"] == []
    assert {row["op"] for row in found["ops"]} >= {"rms_norm_scale", "qk_norm_rope"}
    assert all(row["verified"] > 0 and row["refused"] == 0 for row in found["ops"])
    verified = sum(row["verified"] for row in found["ops"])
    assert found["certificate"] == {"name": name_of(certified()), "verdicts": verified, "problem": None}
    assert kept(cache) == {"verified": verified}
    assert found["runs"] > found["combinations"]


def test_what_is_stored_is_believed_only_when_told_to(cache: Path, kernels: Callable[..., Any]) -> None:
    made = kernels()
    assert run(QWEN, *QUICK).exit_code == 0
    stored = kept(cache)
    gate = made[-1]
    assert {verdict.basis for verdict in gate.verdicts()} == {"a call"}
    done = run(QWEN, *QUICK, "--trust")
    assert done.exit_code == 0
    assert f"certificate {name_of(certified())} holds {stored['verified']} verdicts" in done.stdout
    believed = made[-1]
    assert believed is not gate
    assert {verdict.basis for verdict in believed.verdicts()} == {"a stored verdict"}
    assert sum(verdict.verifications for verdict in believed.verdicts()) == 0

    made = kernels(spoilt="linear_gelu_tanh")
    assert run(QWEN, *QUICK, "--trust").exit_code == 0, "that is what trust means"
    assert run(QWEN, *QUICK).exit_code == 1
    # Two products less; the activations alone, which have those calls then, are as many more.
    assert kept(cache) == {"verified": stored["verified"], "refused": 2}
    made = kernels()
    done = run(QWEN, *QUICK, "--trust")
    assert done.exit_code == 1, "once refused stays refused"
    assert "by a stored verdict" in done.stdout
    assert CliRunner().invoke(main, ["certificates", "clear", "here"]).exit_code == 0
    assert run(QWEN, *QUICK, "--trust").exit_code == 0


def test_what_was_verified_before_an_interruption_is_stored(
    cache: Path, kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels()
    real = Texts.arguments
    turn = iter(range(9))

    def stop(self: Texts, *args: Any) -> Any:
        if next(turn) == 1:
            raise KeyboardInterrupt
        return real(self, *args)

    monkeypatch.setattr(Texts, "arguments", stop)
    done = run(QWEN, "--sizes", "64", "--tokens", "5,6")
    assert done.exit_code == 130
    assert kept(cache)["verified"] > 5


def test_a_certificate_that_cannot_be_written_is_said_to_be(
    cache: Path, kernels: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels()
    (cache / "certificates").write_text("in the way")
    done = run(QWEN, *QUICK)
    assert done.exit_code == 0, "everything was verified all the same"
    assert "the folder is no folder" in done.stdout
    assert "is no folder" in json.loads(run(QWEN, *QUICK, "--json").stdout)["certificate"]["problem"]


def test_one_that_differs_is_1_and_named(cache: Path, kernels: Callable[..., Any]) -> None:
    kernels(spoilt="linear_gelu_tanh")
    done = run(QWEN, *QUICK)
    assert done.exit_code == 1
    assert "refused (linear_gelu_tanh)" in done.stdout
    assert "such as linear_gelu_tanh(x: bfloat16[1, " in done.stdout
    rows = {row["op"]: row for row in json.loads(run(QWEN, *QUICK, "--json").stdout)["ops"]}
    assert (rows["linear_gelu_tanh"]["verified"], rows["linear_gelu_tanh"]["refused"]) == (0, 2)
    assert rows["gelu_tanh"]["verified"] == 2, "what takes over from a refused product is verified too"
    assert rows["qk_norm_rope"]["verified"] == 1, "everything else is verified all the same"


def test_on_a_cpu_nothing_is_verified_and_it_says_why(cache: Path) -> None:
    done = run(QWEN, *QUICK)
    assert done.exit_code == 1
    assert "15 unsupported" in done.stdout
    assert "the tensors are on the CPU" in done.stdout
    assert "no verdict was stored: nothing was compared" in done.stdout
    assert kept(cache) == {}
    found = json.loads(run(QWEN, *QUICK, "--json").stdout)
    assert found["good"] is False
    assert sum(row["unsupported"] for row in found["ops"]) == found["reasons"][0]["signatures"] == 15


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.skipif(jit.unavailable(torch.device("cpu"), host=True) is not None, reason="no C++ compiler")
def test_with_the_kernels_of_the_cpu(cache: Path) -> None:
    done = run(Z_IMAGE, *QUICK, "--guidance", "0", "--host", "--json")
    found = json.loads(done.stdout)
    states = {state: sum(row[state] for row in found["ops"]) for state in ("verified", "refused", "failed", "unknown")}
    assert states["verified"] > 0
    assert states["failed"] == states["unknown"] == 0
    assert done.exit_code == (0 if states["refused"] == 0 else 1)
    assert all(row["op"].endswith("(CPU)") for row in found["ops"])
    assert found["certificate"]["verdicts"] == 0
    assert kept(cache) == {}, "one comparison on a CPU says little about the next"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "MODEL"),
        (["no-such-model"], "no such model"),
        ([QWEN, "--sizes", "65"], "multiples of 16"),
        ([QWEN, "--sizes", "64x"], "WIDTHxHEIGHT"),
        ([QWEN, "--sizes", ""], "WIDTHxHEIGHT"),
        ([QWEN, "--sizes", "64,,128"], "WIDTHxHEIGHT"),
        ([QWEN, "--sizes", "-64"], "WIDTHxHEIGHT"),
        ([QWEN, "--tokens", "0"], "from 1 up"),
        ([QWEN, "--tokens", "64-32"], "from 1 up"),
        ([QWEN, "--tokens", "1-9:0"], "from 1 up"),
        ([QWEN, "--tokens", "1e3"], "from 1 up"),
        ([QWEN, "--tokens", "1-99999999"], "from 1 up"),
        ([QWEN, "--tokens", "32\n"], None),
        ([QWEN, "--tokens", "1025"], "at most 1024 tokens"),
        ([Z_IMAGE, "--tokens", "993"], "at most 992 tokens"),
        ([QWEN, "--batch", "0"], "from 1 up"),
        ([QWEN, "--batch", "two"], "from 1 up"),
        ([QWEN, "--steps", "0"], "steps"),
        ([QWEN, "--guidance", "nan"], "guidance"),
        ([QWEN, "--guidance", "-1"], "guidance"),
        ([QWEN, "--guidance", "1", "--negative-prompt", "rain"], "no effect"),
        ([QWEN, "--device", "cuda:7"], "cuda:7"),
        ([QWEN, "--host", "--device", "cuda"], "--host runs on the CPU"),
        ([QWEN, "--offload", "model", "--device", "cpu"], "offload"),
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_bad_input_is_one_line_and_2(cache: Path, arguments: list[str], said: str | None, as_json: bool) -> None:
    if said is None:
        arguments, said = [*arguments, "--steps", "0"], "steps"  # a line break at the end of a number is let pass
    done = run(*arguments, *(["--json"] if as_json else []))
    assert done.exit_code == 2, done.output
    assert said in (json.loads(done.stdout)["error"] if as_json else done.stderr)
    assert (done.stdout if as_json else done.stderr).count("\n") == 1


def test_the_kill_switch_wins(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_DISABLE", "1")
    done = run(QWEN, *QUICK)
    assert done.exit_code == 2
    assert "SAMEBITS_DISABLE is set" in done.stderr


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1", [1]),
        ("1,3", [1, 3]),
        ("2-4", [2, 3, 4]),
        ("32-96:32", [32, 64, 96]),
        (" 5 , 7-7", [5, 7]),
        ("1-8:3", [1, 4, 7]),
    ],
)
def test_numbers_are_read(text: str, numbers: list[int]) -> None:
    from samebits.cli.warm import parse_numbers

    assert parse_numbers(None, None, (text,)) == numbers  # type: ignore[arg-type]
