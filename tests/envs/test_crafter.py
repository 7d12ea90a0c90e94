from __future__ import annotations

import hashlib
import io
from functools import partial

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tiny_run import DREAMER, tiny_config

from lore_torchrl.configs import EnvConfig
from lore_torchrl.dreamer.run import train
from lore_torchrl.envs.adapter import sample_request
from lore_torchrl.envs.batch import close_env
from lore_torchrl.envs.checks import check_adapter
from lore_torchrl.envs.crafter import Crafter, CrafterDescriber, CrafterEnv, CrafterPlanner
from lore_torchrl.envs.crafter.rules import ACHIEVEMENTS, ACTIONS, CENTER, CODE, ITEMS, VIEW

SMALL = {"area": (16, 16), "max_steps": 400}
LEFT, RIGHT, UP, DOWN = range(4)


def play(env: CrafterEnv, steps: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    """Random steps; what was seen, rewards included."""
    rng = np.random.default_rng(seed)
    seen = [env.reset(seed=seed)[0]]
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(int(rng.integers(len(ACTIONS))))
        seen.append(observation | {"reward": np.float64(reward)})
        if terminated or truncated:
            seen.append(env.reset()[0])
    return seen


def fingerprint(seen: list[dict[str, np.ndarray]]) -> str:
    digest = hashlib.sha256()
    for observation in seen:
        for key in sorted(observation.keys() - {"frame", "observation"}):
            digest.update(np.ascontiguousarray(observation[key]).tobytes())
    return digest.hexdigest()


def test_another_seed_is_another_world():
    first, other = (play(CrafterEnv(**SMALL), 3, seed=seed) for seed in (0, 1))
    assert fingerprint(first) != fingerprint(other)


def test_the_world_is_the_same_whether_it_is_drawn_or_not():
    # Long enough for the night, when pictures draw noise.
    symbolic, pixels, both = (
        play(CrafterEnv(**SMALL, observe=observe), 220)
        for observe in ("symbolic", "pixels", "both")
    )
    assert min(o["stance"][2] for o in symbolic) < 50
    assert fingerprint(symbolic) == fingerprint(pixels) == fingerprint(both)
    assert "frame" not in symbolic[0] and "observation" not in pixels[0]
    assert all(np.array_equal(a["frame"], b["frame"]) for a, b in zip(pixels, both, strict=True))


def test_pictures_for_people_leave_the_world_alone():
    watched, alone = (CrafterEnv(**SMALL, render_mode="rgb_array") for _ in range(2))
    for env in (watched, alone):
        env.reset(seed=3)
    for step in range(230):
        assert watched.render().shape == (288, 288, 3)
        action = step % len(ACTIONS)
        one, other = watched.step(action), alone.step(action)
        assert fingerprint([one[0]]) == fingerprint([other[0]]) and one[1:4] == other[1:4]
        if one[2]:
            break


def test_the_view_is_what_crafter_itself_shows():
    import crafter

    env = CrafterEnv(**SMALL)
    whole = crafter.engine.SemanticView(
        env.game.world,
        [getattr(crafter.objects, kind) for kind in
         ("Player", "Cow", "Zombie", "Skeleton", "Arrow", "Plant")],
    )  # fmt: skip
    rng = np.random.default_rng(0)
    observation, _ = env.reset(seed=1)
    for _ in range(60):
        x, y = env.game.player.pos
        padded = np.pad(whole(), 4)
        expected = padded[x : x + VIEW[0], y + 1 : y + 1 + VIEW[1]]
        assert np.array_equal(observation["view"], expected)
        vector = observation["observation"]
        cells = VIEW[0] * VIEW[1]
        codes = vector[: cells * len(CODE)].reshape(cells, -1).argmax(1)
        assert np.array_equal(codes.reshape(VIEW), expected) and vector.shape == (1282,)
        held = [env.game.player.inventory[item] for item in ITEMS]
        assert observation["inventory"].tolist() == held
        observation, _, terminated, *_ = env.step(int(rng.integers(len(ACTIONS))))
        if terminated:
            observation, _ = env.reset()


def test_a_world_is_kept_until_it_is_played_in():
    env = CrafterEnv(**SMALL)
    first, again = env.reset(seed=2)[0], env.reset()[0]
    assert fingerprint([first]) == fingerprint([again])
    assert fingerprint([env.reset(seed=3)[0]]) != fingerprint([first])
    assert fingerprint([env.reset(seed=2)[0]]) == fingerprint([first])
    env.step(0)
    assert fingerprint([env.reset()[0]]) != fingerprint([first])


def test_masked_actions_change_nothing():
    env = CrafterEnv(**SMALL)
    observation, _ = env.reset(seed=0)
    player = env.game.player
    place, make = ACTIONS.index("place_table"), ACTIONS.index("make_wood_pickaxe")
    assert not observation["action_mask"][place] and not observation["action_mask"][make]
    assert env.step(place)[0]["inventory"][ITEMS.index("wood")] == 0
    player.inventory["wood"] = 9
    observation = env.step(0)[0]
    assert observation["action_mask"][place] and not observation["action_mask"][make]
    observation = env.step(place)[0]
    assert (
        observation["action_mask"][make]
        and observation["achievements"][ACHIEVEMENTS.index("place_table")]
    )
    assert env.step(make)[0]["inventory"][ITEMS.index("wood_pickaxe")] == 1
    assert not env.step(0)[0]["action_mask"][ACTIONS.index("make_iron_pickaxe")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"observe": "smell"}, "observe.*smell"),
        ({"area": (4, 16)}, "area.*4"),
        ({"goal": "fly"}, "collect_coal.*fly"),
    ],
)
def test_impossible_worlds(settings, message):
    with pytest.raises(ValueError, match=message):
        Crafter(**settings)


def situation(cells: dict[tuple[int, int], str], facing: int = DOWN, **held: int):
    """A request on an island of grass with things at offsets from the player."""
    return CrafterDescriber().request(0, observed(cells, facing, **held))


EASY = (
    *("collect_sapling", "place_plant", "collect_drink", "eat_cow", "wake_up"),
    *("defeat_zombie", "defeat_skeleton", "eat_plant"),
)


def observed(cells, facing, unlocked=EASY, **held):
    """What is seen there, with the easy achievements unlocked."""
    view = np.full(VIEW, CODE["grass"], dtype=np.uint8)
    view[CENTER] = CODE["player"]
    for (dx, dy), kind in cells.items():
        view[CENTER[0] + dx, CENTER[1] + dy] = CODE[kind]
    inventory = {item: 9 if item in ("health", "food", "drink", "energy") else 0 for item in ITEMS}
    inventory |= held
    return {
        "view": view,
        "inventory": np.array([inventory[item] for item in ITEMS], dtype=np.uint8),
        "stance": np.array([facing, 0, 100], dtype=np.uint8),
        "achievements": np.array([name in unlocked for name in ACHIEVEMENTS]),
    }


def test_situations_are_told_apart_by_what_is_of_use_now():
    key = partial(CrafterDescriber().abstract_state, 0)
    tree_and_water = {(2, 1): "tree", (-1, 0): "water"}
    assert key(observed(tree_and_water, RIGHT)) == "||0|right|free|tree 11 0"
    assert key(observed(tree_and_water, LEFT)) == "||0|left|blocked|tree 11 0"
    # Who is thirsty, or has never drunk, looks at the water.
    assert key(observed(tree_and_water, LEFT, drink=4)) == "drink||0|left|water|water -10 1"
    fresh = key(observed(tree_and_water, RIGHT, unlocked=()))
    assert fresh == "||0|right|grass|water -10 1"
    # Wood for a table and a tool; then the table; no more wood when all that takes it is made.
    seen = key(observed(tree_and_water, RIGHT, wood=2))
    assert seen == "|table,wood_pickaxe,wood_sword|0|right|free|tree 11 0"
    seen = key(observed(tree_and_water, RIGHT, unlocked=(*EASY, "collect_wood"), wood=3))
    assert seen == "|table!,wood_pickaxe,wood_sword|0|right|free|"
    tools = {item: 1 for item in ITEMS if "pickaxe" in item or "sword" in item}
    built = (*EASY, "place_table", "collect_wood")
    assert key(observed(tree_and_water, RIGHT, unlocked=built, **tools)) == "||0|right|free|"
    far = {(0, -3): "table", (1, 1): "tree"}
    seen = key(observed(far, RIGHT, unlocked=built, wood=1))
    assert seen == "|wood_pickaxe,wood_sword|0|right|free|table 0-1 0"
    seen = key(observed({(1, 1): "table"}, RIGHT, unlocked=built, wood=1))
    assert seen.startswith("|wood_pickaxe!,wood_sword!|")
    # A table out of sight is one to be built again.
    assert key(observed({}, RIGHT, unlocked=built, wood=3)).startswith("|table!,wood_pickaxe,")
    # Stone is of use with a pickaxe alone; weakness matters beside an enemy alone.
    assert key(observed({(1, 0): "stone"}, RIGHT)) == "||0|right|blocked|"
    assert key(observed({(1, 0): "stone"}, RIGHT, wood_pickaxe=1)) == "||0|right|stone|stone 10 1"
    assert key(observed({}, RIGHT, health=2)) == "||0|right|free|"
    zombie = key(observed({(3, 0): "zombie"}, RIGHT, health=3))
    assert zombie == "health||0|right|free|zombie 10 0"
    assert key(observed({(1, 0): "lava"}, RIGHT)) == "||0|right|lava|"
    rested = key(observed({}, DOWN, unlocked=set(EASY) - {"wake_up"}, energy=9))
    assert rested == "||0|down|free|"
    tired = key(observed({}, DOWN, unlocked=set(EASY) - {"wake_up"}, energy=8))
    assert tired == "|sleep|0|down|free|"
    assert key(observed({}, DOWN, energy=3)).startswith("energy||0|")


@pytest.mark.parametrize(
    ("cells", "facing", "held", "best"),
    [
        ({(1, 0): "tree"}, RIGHT, {}, "do"),
        ({(1, 0): "tree"}, DOWN, {}, "move_right"),
        ({(0, -3): "tree"}, DOWN, {}, "move_up"),
        ({(1, 0): "water", (2, 0): "tree"}, RIGHT, {"drink": 3}, "do"),
        ({(-1, 0): "zombie"}, LEFT, {}, "do"),
        ({(-1, 0): "zombie"}, LEFT, {"health": 2}, "move_right"),
        ({}, DOWN, {"wood": 9}, "place_table"),
        ({(1, 1): "table"}, DOWN, {"wood": 1}, "make_wood_pickaxe"),
        ({(0, 1): "stone"}, DOWN, {"wood": 9, "wood_pickaxe": 1, "wood_sword": 1}, "do"),
        ({}, DOWN, {"energy": 2}, "sleep"),
        # A way around the lava.
        ({(1, 0): "lava", (2, 0): "tree", (0, 1): "lava"}, RIGHT, {}, "move_up"),
        # Nor into it where there is no way on.
        (
            {(-1, 0): "lava", (1, 0): "stone", (0, -1): "stone", (0, 1): "stone"},
            UP,
            {},
            "move_right",
        ),
        ({(-1, 0): "lava", (1, 0): "lava", (0, -1): "lava", (0, 1): "lava"}, UP, {}, "noop"),
    ],
)
def test_what_the_planner_finds_best(cells, facing, held, best):
    values = CrafterPlanner()(situation(cells, facing, **held))
    assert ACTIONS[int(np.argmax(values))] == best
    for direction, name in ((1, "move_right"), (-1, "move_left")):
        if cells.get((direction, 0)) == "lava":
            assert values[ACTIONS.index(name)] == -1.0


def in_a_field(cells, place=(8, 8), **held):
    """A world of grass with nothing in it but the player and these cells."""
    env = CrafterEnv(area=(20, 20))
    env.reset(seed=0)
    player, world = env.game.player, env.game.world
    for thing in [thing for thing in world.objects if thing is not player]:
        world.remove(thing)
    for cell in np.ndindex(20, 20):
        world[cell] = "grass"
    for cell, material in cells.items():
        world[cell] = material
    world.move(player, np.array(place))
    player.facing = (1, 0)
    player.inventory.update(held)
    # No animals come, and nothing is left to be done but to make tools.
    env.game._balance_chunk = lambda *_: None
    player.achievements = dict.fromkeys(ACHIEVEMENTS, 1)
    return env, player


@pytest.mark.parametrize(
    ("cells", "place", "held", "made"),
    [
        # A gap of one cell on the left, open to both sides.
        ({(9, 8): "water", (6, 8): "water"}, (8, 8), {"wood": 5}, "wood_pickaxe"),
        # Table and furnace too far apart to use both, and near enough.
        (
            {(7, 7): "table", (11, 7): "furnace"},
            (8, 8),
            {"wood": 5, "stone": 9, "coal": 2, "iron": 2},
            "iron_pickaxe",
        ),
        (
            {(6, 7): "table", (8, 7): "furnace"},
            (9, 8),
            {"wood": 5, "stone": 9, "coal": 2, "iron": 2},
            "iron_pickaxe",
        ),
        # At the upper and the left edge of the world nothing counts as near.
        ({(5, 1): "table"}, (5, 0), {"wood": 5}, "wood_pickaxe"),
        ({(1, 5): "table"}, (0, 5), {"wood": 5}, "wood_pickaxe"),
    ],
)
def test_the_planner_gets_its_tool_made(cells, place, held, made):
    tools = ("wood_pickaxe", "stone_pickaxe", "wood_sword", "stone_sword")
    earlier = dict.fromkeys(tools, 1) if made == "iron_pickaxe" else {}
    env, player = in_a_field(cells, place, **earlier, **held)
    describer, planner = CrafterDescriber(), CrafterPlanner()
    observation = env.step(0)[0]
    for _ in range(25):
        if player.inventory[made]:
            return
        action = int(np.argmax(planner(describer.request(0, observation))))
        name = ACTIONS[action]
        if name.startswith("make"):
            assert observation["action_mask"][action]
        before = player.inventory.copy()
        observation = env.step(action)[0]
        if name.startswith("make"):
            assert player.inventory != before, "what the mask allows has an effect"
    pytest.fail(f"no {made} within 25 steps")


def test_the_planner_climbs_the_tree_and_chance_does_not():
    describer, planner = CrafterDescriber(), CrafterPlanner()
    rng, counts = np.random.default_rng(0), {}
    for chance in (False, True):
        env = CrafterEnv(area=(40, 40), max_steps=250)
        observation, _ = env.reset(seed=4)
        for _ in range(250):
            values = planner(describer.request(0, observation))
            action = int(rng.integers(len(ACTIONS)) if chance else np.argmax(values))
            observation, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                break
        counts[chance] = int(observation["achievements"].sum())
    assert counts[False] >= 8 and counts[True] <= 5


def test_every_situation_can_be_described_drawn_and_planned_for():
    describer, planner = CrafterDescriber(image=True), CrafterPlanner()
    from PIL import Image

    texts = {}
    for index, observation in enumerate(play(CrafterEnv(**SMALL), 300)):
        if index % 50:
            describer.image = False
        request = describer.request(0, observation)
        values = planner(request)
        assert len(values) == len(ACTIONS) and max(values) == 1.0
        # One key, one text.
        assert texts.setdefault(request.cache_key, request.description) == request.description
        assert describer.abstract_state(0, observation).count("|") == 5
        if index % 50 == 0:
            assert Image.open(io.BytesIO(request.image)).size == (288, 288)
        describer.image = True
    assert len(texts) > 100


def test_the_question_tells_what_is_seen():
    request = situation({(1, 0): "tree", (-4, 3): "ripe plant"}, RIGHT, wood=2)
    assert "You face right: tree." in request.description
    assert "'T' tree" in request.description and "'P' ripe plant" in request.description
    assert "@T" in request.description and "You carry: 2 wood" in request.description
    assert "Achieved: collect drink" in request.description
    assert "'@' you" in request.description and request.actions == ACTIONS


def test_score_and_rates():
    unlocked = torch.zeros(4, len(ACHIEVEMENTS), dtype=torch.bool)
    assert Crafter().summarize_episodes(TensorDict({"achievements": unlocked}, [4]))[
        "crafter/score"
    ] == pytest.approx(0.0)
    unlocked[:, 0], unlocked[:2, 1] = True, True
    summary = Crafter().summarize_episodes(TensorDict({"achievements": unlocked}, [4]))
    # exp((ln 101 + ln 51) / 22) - 1
    assert summary["crafter/score"] == pytest.approx((101 * 51) ** (1 / 22) - 1, rel=1e-5)
    assert summary["crafter/achievements"] == pytest.approx(1.5)
    assert summary[f"crafter/unlock_{ACHIEVEMENTS[1]}"] == pytest.approx(0.5)
    ended = torch.tensor([[True], [False], [False], [True]])
    batch = TensorDict({"next": TensorDict({"achievements": unlocked, "done": ended}, [4])}, [4])
    part = Crafter().summarize(batch)
    assert part["crafter/achievements"] == [2.0, 1.0] and "crafter/score" not in part
    assert part[f"crafter/unlock_{ACHIEVEMENTS[0]}"] == [1.0, 1.0]
    assert part[f"crafter/unlock_{ACHIEVEMENTS[1]}"] == [1.0, 0.0]
    assert {*part, "crafter/score"} == set(summary)
    batch["next", "done"] = torch.zeros_like(ended)
    assert not any(Crafter().summarize(batch).values())


@pytest.mark.parametrize("observe", ["both", pytest.param("pixels", marks=pytest.mark.slow)])
def test_a_whole_run(observe, tmp_path):
    options = {"observe": observe, "area": [16, 16], "goal": "collect_sapling"}
    env = EnvConfig(
        adapter="lore_torchrl.envs.crafter.Crafter",
        id="Crafter",
        num_envs=2,
        max_steps=24,
        options=options,
    )
    config = tiny_config(
        tmp_path / "run", env=env, dreamer=DREAMER, total_steps=64, checkpoint_interval=64
    )
    config.dreamer.image_depth = 1
    summary = train(config)
    assert summary["advice/calls"] > 0
    assert 0.0 <= summary["eval/crafter/achievements"] <= 22.0
    assert summary["eval/crafter/unlock_collect_sapling"] == summary["eval/success"]
    assert summary["loss/model_reco"] > 0.0
    from lore_torchrl.inspection import play as inspect

    moment = inspect(tmp_path / "run", max_steps=2).episodes[0].moments[0]
    assert moment.frame.shape == (288, 288, 3) and len(moment.policy) == len(ACTIONS)


def test_what_the_policy_is_to_see_is_checked():
    sizes = check_adapter(Crafter(observe="both", **SMALL), abstract_states=True, masked=True)
    assert sizes == (1282, (3, 64, 64), 17, None)
    assert check_adapter(Crafter(observe="pixels", **SMALL))[:2] == (None, (3, 64, 64))
    assert check_adapter(Crafter(**SMALL), image=True)[1] is None
    with pytest.raises(ValueError, match=r"remembers nothing: set env\.memory=false"):
        check_adapter(Crafter(**SMALL), memory=True)


def test_rows_of_a_batch_are_worlds_of_their_own():
    env = Crafter(**SMALL).make_env(num_envs=2, seed=0)
    views = env.reset()["view"]
    assert not torch.equal(views[0], views[1])
    again = Crafter(**SMALL).make_env(num_envs=3, seed=0)
    assert torch.equal(again.reset()["view"][:2], views)
    for batch in (env, again):
        close_env(batch)


def test_a_sampled_question():
    assert sample_request(Crafter(**SMALL), steps=3, image=True).image[:4] == b"\x89PNG"


def test_asleep_and_tired_nothing_can_be_made_or_placed():
    index, noop = ACTIONS.index("place_stone"), ACTIONS.index("noop")
    # With full energy the game wakes first.
    for asleep, energy, possible in ((False, 5, True), (True, 5, False), (True, 9, True)):
        env, player = in_a_field({}, stone=9, energy=energy)
        env.game.world.daylight = 0.0  # nobody is woken by the sun
        player.sleeping = asleep
        assert env.step(noop)[0]["action_mask"][index] == possible


def test_the_legend_says_that_lava_is_deadly():
    env = CrafterEnv(area=(16, 16))
    seen, _ = env.reset(seed=0)
    assert "deadly" not in CrafterDescriber().request(0, seen).description
    seen["view"][0, 0] = CODE["lava"]
    assert "lava (deadly)" in CrafterDescriber().request(0, seen).description


def test_the_achievements_are_the_subgoals():
    describer = CrafterDescriber()
    assert len(describer.subgoals) == 22 and "collect wood" in describer.subgoals
    seen = CrafterEnv(**SMALL).reset(seed=0)[0]
    assert describer.reached(0, seen) == set()
    seen["achievements"] = np.array(ACHIEVEMENTS) == "place_table"
    assert describer.reached(0, seen) == {"place table"}
    assert describer.request(0, seen).subgoals == describer.subgoals


def test_a_plan_ends_where_another_kind_of_thing_comes_into_view():
    describer, seen = CrafterDescriber(), CrafterEnv(**SMALL).reset(seed=0)[0]
    seen["view"][:] = CODE["grass"]
    seen["view"][1, 1], seen["view"][2, 2] = CODE["tree"], CODE["zombie"]
    assert describer.things(0, seen) == {"tree", "zombie"}
