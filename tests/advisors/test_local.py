import asyncio
import math
import pickle
import threading
import time

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

import tokenizers
import transformers
from tensordict import TensorDict, lazy_stack
from torchrl.modules.llm import TransformersWrapper

from lore_torchrl.advisors.base import Advice, AdviceRequest, Advisor
from lore_torchrl.advisors.errors import NotFiniteError, PromptTooLongError
from lore_torchrl.advisors.local import LocalAdvisor, decidedness

ACTIONS = ("left", "go forward", "pick up the key", "toggle")
WORDS = "You see a key. Turn left, go forward, pick up the key or toggle the door."


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def make_tokenizer(**settings):
    """A byte-level BPE tokenizer of 320 tokens, trained on a sentence."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    if settings.pop("wrap", False):
        made.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", **settings
    )


def make_model(kind="llama", positions=512, seed=0):
    """Two random layers of width 32; large weights, so that the scores differ."""
    ids = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.5}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "gpt2":
            config = transformers.GPT2Config(
                n_positions=positions, n_embd=32, n_layer=2, n_head=2, **ids
            )
            return transformers.GPT2LMHeadModel(config)
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=positions,
            **ids,
        )
        return transformers.LlamaForCausalLM(config)


def ask(text="a key ahead", actions=ACTIONS, **changes):
    return AdviceRequest(text, actions, text, **changes)


def answers(advisor, *requests):
    return asyncio.run(advisor.advise(list(requests)))


def naive(advisor, request):
    """Log-likelihoods one action, one token at a time, with nothing padded."""
    prompt = advisor.prompt_text(request)
    start = len(advisor.tokenizer(prompt)["input_ids"])
    scores = []
    for action in request.actions:
        tokens = advisor.tokenizer(f"{prompt} {action}")["input_ids"]
        total = 0.0
        for index in range(start, len(tokens)):
            with torch.no_grad():
                logits = advisor.model(torch.tensor([tokens[:index]])).logits[0, -1]
            total += logits.double().log_softmax(-1)[tokens[index]].item()
        scores.append(total)
    return scores


REQUESTS = [ask("a key ahead"), ask("x", ACTIONS[:2]), ask(WORDS * 3), ask(WORDS, ACTIONS[::-1])]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_scores_equal_the_naive_loop(tokenizer, kind):
    advisor = LocalAdvisor(make_model(kind), tokenizer=tokenizer)
    assert isinstance(advisor, Advisor)
    for request, answer in zip(REQUESTS, answers(advisor, *REQUESTS), strict=True):
        expected = naive(advisor, request)
        assert answer.logits == pytest.approx(expected, abs=1e-3)
        assert max(expected) - min(expected) > 1
        assert answer.confidence == pytest.approx(decidedness(expected), abs=1e-3)
        assert len(answer.raw.splitlines()) == len(request.actions)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("max_sequences", [1, 3, 64])
def test_neither_padding_nor_batching_changes_a_score(tokenizer, kind, max_sequences):
    advisor = LocalAdvisor(make_model(kind), tokenizer=tokenizer, max_sequences=max_sequences)
    forwards = []
    advisor.model.register_forward_hook(lambda *_: forwards.append(1))
    together = answers(advisor, *REQUESTS)
    assert len(forwards) == math.ceil(14 / max_sequences)
    for request, answer in zip(REQUESTS, together, strict=True):
        (alone,) = answers(advisor, request)
        assert answer.logits == pytest.approx(alone.logits, abs=1e-4)
        assert answer.usage == alone.usage


def test_only_the_logits_that_count_are_computed(tokenizer):
    model = make_model()
    shapes = []
    model.lm_head.register_forward_hook(lambda _, __, out: shapes.append(out.shape))
    (answer,) = answers(LocalAdvisor(model, tokenizer=tokenizer), ask(WORDS * 3))
    assert answer.usage.prompt_tokens > 200
    assert shapes[0][1] < 20


def test_a_model_that_keeps_all_logits_scores_the_same(tokenizer):
    advisor = LocalAdvisor(make_model(), tokenizer=tokenizer)
    expected = answers(advisor, *REQUESTS)
    advisor.keeps_logits = False
    for answer, other in zip(answers(advisor, *REQUESTS), expected, strict=True):
        assert answer.logits == pytest.approx(other.logits, abs=1e-4)


def test_scores_agree_with_torchrls_own(tokenizer):
    model = make_model().eval()
    advisor = LocalAdvisor(model, tokenizer=tokenizer)
    request = ask()
    prompt = advisor.prompt_text(request)
    texts = [tokenizer(f"{prompt} {action}")["input_ids"] for action in ACTIONS]
    wrapper = TransformersWrapper(
        model, tokenizer=tokenizer, input_mode="tokens", generate=False, pad_output=True
    )
    td = lazy_stack(
        [
            TensorDict(
                {
                    ("tokens", "full"): torch.tensor(tokens),
                    ("masks", "all_attention_mask"): torch.ones(len(tokens), dtype=torch.bool),
                }
            )
            for tokens in texts
        ]
    )
    with torch.no_grad():
        log_probs = wrapper(td)["log_probs", "full"]
    start = len(tokenizer(prompt)["input_ids"])
    expected = [
        row[start - len(tokens) :].sum().item()
        for row, tokens in zip(log_probs, texts, strict=True)
    ]
    assert answers(advisor, request)[0].logits == pytest.approx(expected, abs=1e-3)


def test_length_normalisation_divides_by_the_tokens(tokenizer):
    model = make_model()
    (total,) = answers(LocalAdvisor(model, tokenizer=tokenizer), ask())
    (mean,) = answers(LocalAdvisor(model, tokenizer=tokenizer, length_normalized=True), ask())
    counts = [len(tokenizer(f" {action}")["input_ids"]) for action in ACTIONS]
    assert len(set(counts)) > 1
    expected = [score / count for score, count in zip(total.logits, counts, strict=True)]
    assert mean.logits == pytest.approx(expected)


def test_special_tokens_go_before_the_prompt_and_never_before_the_action():
    model, plain = make_model(), make_tokenizer()
    advisor = LocalAdvisor(model, tokenizer=make_tokenizer(wrap=True))
    tokens, start = advisor.encode(ask())[0]
    bare, bare_start = LocalAdvisor(model, tokenizer=plain).encode(ask())[0]
    assert tokens == [0, *bare] and start == bare_start + 1


def test_actions_that_merge_with_the_prompt_are_scored_over_the_same_text(tokenizer):
    advisor = LocalAdvisor(make_model(), tokenizer=tokenizer, prompt="{description}\n", chat=False)
    request = ask("go for", ("ward", "x"))
    encoded = advisor.encode(request)
    texts = [tokenizer.decode(tokens[start:]) for tokens, start in encoded]
    assert len({text.removesuffix(a) for text, a in zip(texts, request.actions, strict=True)}) == 1
    assert len({start for _, start in encoded}) == 1


def test_chat_templates_are_used_where_there_is_one():
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}bot:"
    chatty = make_tokenizer(chat_template=template)
    advisor = LocalAdvisor(make_model(), tokenizer=chatty, prompt="{mission}? {description}")
    assert advisor.prompt_text(ask(mission="go")) == "<s>user: go? a key ahead</s>bot:"
    assert isinstance(answers(advisor, ask())[0], Advice)
    silent = LocalAdvisor(make_model(), tokenizer=chatty, chat=False)
    assert silent.prompt_text(ask()).startswith("a key ahead")
    assert silent.cache_prefix != advisor.cache_prefix
    with pytest.raises(ValueError, match="no chat template"):
        LocalAdvisor(make_model(), tokenizer=make_tokenizer(), chat=True)


def test_the_task_is_told_where_neither_description_nor_template_names_it(tokenizer):
    advisor = LocalAdvisor(make_model(), tokenizer=tokenizer)
    assert advisor.prompt_text(ask(mission="go")).startswith("Mission: go\n\na key ahead\n\n")
    assert advisor.prompt_text(ask(mission="a key")).startswith("a key ahead\n\n")


def test_an_end_that_the_template_writes_is_no_part_of_the_answer():
    template = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"
    ended = LocalAdvisor(make_model(), tokenizer=make_tokenizer(chat_template=template))
    encoded = ended.encode(ask())
    assert all(tokens[start - 1] == 1 and 1 not in tokens[start:] for tokens, start in encoded)


def test_a_folder_may_be_a_path_or_begin_at_home(tokenizer, tmp_path, monkeypatch):
    make_model().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = [LocalAdvisor(where, device="cpu") for where in (tmp_path / "model", "~/model")]
    assert found[0].cache_prefix == found[1].cache_prefix
    assert answers(found[0], ask()) == answers(found[1], ask())


def test_models_of_other_weights_have_another_prefix(tokenizer):
    model = make_model()
    before = LocalAdvisor(model, tokenizer=tokenizer).cache_prefix
    other = LocalAdvisor(make_model(seed=1), tokenizer=tokenizer).cache_prefix
    with torch.no_grad():
        next(model.parameters()).mul_(1.1)
    assert len({before, other, LocalAdvisor(model, tokenizer=tokenizer).cache_prefix}) == 3


def test_answers_of_other_settings_have_another_prefix():
    model, tokenizer = make_model(), make_tokenizer()
    settings = [
        {},
        {"prompt": "{description}!"},
        {"length_normalized": True},
        {"max_tokens": 60},
    ]
    advisors = [LocalAdvisor(model, tokenizer=tokenizer, **kwargs) for kwargs in settings]
    assert len({advisor.cache_prefix for advisor in advisors}) == len(settings)
    assert LocalAdvisor(model, tokenizer=tokenizer).cache_prefix == advisors[0].cache_prefix
    # In parts, or how many at a time, is no other answer.
    other = LocalAdvisor(model, tokenizer=tokenizer, max_sequences=2)
    assert other.cache_prefix == advisors[0].cache_prefix


@pytest.mark.parametrize("settings", [{"max_tokens": 60}, {"positions": 60}, {"known": 60}])
def test_a_prompt_that_is_too_long_gets_an_error_of_its_own(settings):
    known = {"model_max_length": settings["known"]} if "known" in settings else {}
    advisor = LocalAdvisor(
        make_model("gpt2", settings.get("positions", 512)),
        tokenizer=make_tokenizer(**known),
        max_tokens=settings.get("max_tokens"),
        prompt="{description}",
    )
    fits, long = answers(advisor, ask(), ask(WORDS * 9))
    assert isinstance(fits, Advice)
    assert isinstance(long, PromptTooLongError) and "the 60 that" in str(long)


def test_the_loop_stays_free_and_forwards_take_turns(tokenizer):
    model, busy, most, threads = make_model(), 0, 0, set()

    def enter(*_):
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        threads.add(threading.get_ident())
        time.sleep(0.05)

    def leave(*_):
        nonlocal busy
        busy -= 1

    model.register_forward_pre_hook(enter)
    model.register_forward_hook(leave)
    advisor = LocalAdvisor(model, tokenizer=tokenizer)

    async def run():
        asked = [asyncio.ensure_future(advisor.advise([ask()])) for _ in range(3)]
        ticks = 0
        while not all(task.done() for task in asked):
            await asyncio.sleep(0.005)
            ticks += 1
        return ticks

    assert asyncio.run(run()) > 10
    assert most == 1 and threading.get_ident() not in threads


def test_nothing_is_trained_and_no_random_number_drawn(tokenizer, tmp_path):
    make_model("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    state = torch.get_rng_state()
    advisor = LocalAdvisor(str(tmp_path), device="cpu", dtype="float64")
    first, second = answers(advisor, ask(), ask())
    assert torch.equal(torch.get_rng_state(), state)
    assert first == second, "dropout is off"
    assert all(parameter.grad is None for parameter in advisor.model.parameters())
    assert next(advisor.model.parameters()).dtype == torch.float64
    assert advisor.model_name == str(tmp_path) and advisor.device == torch.device("cpu")


def test_16_bits_stay_close(tokenizer):
    (exact,) = answers(LocalAdvisor(make_model(), tokenizer=tokenizer), ask())
    (rounded,) = answers(LocalAdvisor(make_model(), tokenizer=tokenizer, dtype="bfloat16"), ask())
    assert rounded.logits == pytest.approx(exact.logits, rel=0.1)
    assert rounded.logits != exact.logits


def test_numbers_that_overflow_are_an_error_and_not_advice(tokenizer):
    advisor = LocalAdvisor(make_model(), tokenizer=tokenizer)
    advisor.model.lm_head.weight.data.fill_(math.nan)
    (answer,) = answers(advisor, ask())
    assert isinstance(answer, NotFiniteError) and answer.usage.tokens > 0
    assert answers(advisor) == []


def test_it_pickles(tokenizer):
    advisor = LocalAdvisor(make_model(), tokenizer=tokenizer)
    copy = pickle.loads(pickle.dumps(advisor))
    assert answers(copy, ask()) == answers(advisor, ask())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 1}, "max_tokens=1"),
        ({"max_sequences": 0}, "max_sequences=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"dtype": "short"}, "dtype='short'"),
        ({"prompt": "{descripton}"}, "descripton"),
        ({"prompt": "which way?"}, "lacks {description}"),
        ({"tokenizer": None}, "without a tokenizer"),
    ],
)
def test_bad_settings_fail_with_the_value(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        LocalAdvisor(make_model(), **({"tokenizer": tokenizer} | settings))


def test_without_transformers_the_extra_is_named(tokenizer, monkeypatch):
    import sys

    model = make_model()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match=r"lore-torchrl\[local\]"):
        LocalAdvisor(model, tokenizer=tokenizer)


def test_confidence_is_one_minus_the_normalized_entropy():
    assert decidedness([2.0] * 7) == 0 and decidedness([0.0]) == 1
    p = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    expected = 1 + (p * p.log()).sum().item() / math.log(3)
    assert decidedness(p.log().tolist()) == pytest.approx(expected)
    assert decidedness([-1e4, -2e4]) == 1
