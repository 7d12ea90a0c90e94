import asyncio

import numpy as np
import pytest
import torch

pytest.importorskip("minigrid")

import gymnasium as gym
from hypothesis import given
from hypothesis import strategies as st

from lore_torchrl.advisors.base import AdviceRequest, Describer
from lore_torchrl.advisors.scripted import ScriptedAdvisor
from lore_torchrl.envs.batch import row_seed
from lore_torchrl.envs.minigrid import MiniGridPlanner
from lore_torchrl.envs.minigrid.describer import (
    ACTIONS,
    BALL,
    BOX,
    CLOSED,
    DOOR,
    EMPTY,
    GOAL,
    KEY,
    LAVA,
    LOCKED,
    UNSEEN,
    WALL,
    MiniGridDescriber,
)
from lore_torchrl.envs.minigrid.environment import valid_actions

GET_GOAL = "get to the green goal square"


def observation(things=(), *, held=None, mission=GET_GOAL, direction=0):
    """Walls around the agent's view, with ``things`` at (column, row)."""
    image = np.ones((7, 7, 3), dtype=np.uint8) * np.array([EMPTY, 0, 0], dtype=np.uint8)
    image[0], image[6], image[:, 0] = (WALL, 5, 0), (WALL, 5, 0), (WALL, 5, 0)
    for place, content in things:
        image[place] = content
    if held is not None:
        image[3, 6] = (*held, 0)
    return {"image": image, "direction": np.array([direction]), "mission": mission}


def values(seen, **settings):
    describer = MiniGridDescriber(**settings)
    describer.observe(0, seen, None, reset=True)
    advice = MiniGridPlanner()(describer.request(0, seen))
    return dict(zip(ACTIONS, advice, strict=True))


def best(seen, **settings):
    advice = values(seen, **settings)
    return max(advice, key=advice.get)


def solved(env_id, *, memory, episodes=100):
    """Act alone by the advice; return successes and the number of distinct cache keys."""
    env = gym.make(env_id, disable_env_checker=True)
    describer = MiniGridDescriber(memory=memory)
    advisor = ScriptedAdvisor(MiniGridPlanner())
    wins, actions = 0, {}
    for episode in range(episodes):
        seen, _ = env.reset(seed=row_seed(0, episode, evaluation=True))
        describer.observe(0, seen, None, reset=True)
        ended = False
        while not ended:
            key = describer.cache_key(0, seen)
            if key not in actions:
                (advice,) = asyncio.run(advisor.advise([describer.request(0, seen)]))
                actions[key] = int(np.argmax(advice.logits))
            action = actions[key]
            seen, reward, terminated, truncated, _ = env.step(action)
            describer.observe(0, seen, action, reset=False)
            ended = terminated or truncated
        wins += reward > 0
    return wins, len(actions)


@pytest.mark.parametrize("name", ["DoorKey-5x5", "DoorKey-6x6", "DoorKey-8x8"])
def test_solves_doorkey_with_memory(name):
    wins, _ = solved(f"MiniGrid-{name}-v0", memory=True, episodes=40)
    assert wins >= 38


@pytest.mark.parametrize(
    "env_id",
    [
        "MiniGrid-Empty-Random-6x6-v0",
        "MiniGrid-MultiRoom-N2-S4-v0",
        "MiniGrid-Unlock-v0",
        "MiniGrid-LavaGapS6-v0",
        "MiniGrid-KeyCorridorS3R1-v0",
        "MiniGrid-UnlockPickup-v0",
        "MiniGrid-Fetch-6x6-N2-v0",
        "MiniGrid-KeyCorridorS3R2-v0",
        "MiniGrid-ObstructedMaze-1Dl-v0",
        "MiniGrid-GoToDoor-5x5-v0",
        "MiniGrid-GoToObject-6x6-N2-v0",
        "BabyAI-GoToRedBall-v0",
        "BabyAI-GoToLocal-v0",
        "BabyAI-OpenDoorColor-v0",
    ],
)
def test_solves_other_missions_with_memory(env_id):
    wins, _ = solved(env_id, memory=True, episodes=10)
    assert wins == 10


def test_does_not_take_up_and_drop_the_same_thing_for_ever():
    """Distractors lie about: keys of no known use, and things that bar the locked door."""
    wins, _ = solved("BabyAI-UnlockPickupDist-v0", memory=True, episodes=40)
    assert wins >= 39


@pytest.mark.parametrize(
    ("env_id", "least"),
    [
        ("MiniGrid-KeyCorridorS3R1-v0", 20),
        ("MiniGrid-ObstructedMaze-1Dlhb-v0", 10),
        ("BabyAI-KeyInBox-v0", 10),
    ],
)
def test_solves_what_random_steps_have_disturbed(env_id, least):
    """Half of 120 steps are random; then the advice alone has to get there, with no step lost."""
    env = gym.make(env_id, disable_env_checker=True, max_steps=1000)
    describer, planner = MiniGridDescriber(memory=True), MiniGridPlanner()
    generator, wins = np.random.default_rng(0), 0
    for episode in range(least):
        seen, _ = env.reset(seed=episode)
        describer.observe(0, seen, None, reset=True)
        for step in range(400):
            possible = np.flatnonzero(valid_actions(torch.as_tensor(seen["image"])).numpy())
            action = int(np.argmax(planner(describer.request(0, seen))))
            assert action in possible
            if step < 120 and generator.random() < 0.5:
                action = int(generator.choice(possible))
            seen, reward, ended, _, _ = env.step(action)
            describer.observe(0, seen, action, reset=False)
            if ended:
                break
        wins += reward > 0
    assert wins == least


THINGS = {
    **{"#": (WALL, 5, 0), ".": (EMPTY, 0, 0), "^": (EMPTY, 0, 0), "?": (UNSEEN, 0, 0)},
    **{"K": (KEY, 4, 0), "k": (KEY, 2, 0), "O": (BALL, 0, 0), "B": (BOX, 5, 0), "G": (GOAL, 1, 0)},
    **{"L": (DOOR, 4, LOCKED), "l": (DOOR, 2, LOCKED), "D": (DOOR, 4, CLOSED), "~": (LAVA, 0, 0)},
}


def on_map(drawing, mission, carrying=None):
    """The best action on a remembered map, drawn by row; ``None`` without advice."""
    rows = drawing.split()
    cells = np.array([[THINGS[sign] for sign in line] for line in rows], dtype=np.uint8)
    (place,) = [(line.index("^"), row) for row, line in enumerate(rows) if "^" in line]
    facts = {
        "map": cells.swapaxes(0, 1),
        "position": place,
        "carrying": carrying,
        "mission": mission,
        "memory": True,
        "view": np.zeros((7, 7, 3), dtype=np.uint8),
    }
    advice = MiniGridPlanner()(AdviceRequest("text", ACTIONS, "key", facts=facts))
    return None if advice is None else ACTIONS[int(np.argmax(advice))]


BALL_MISSION, GO_MISSION = "pick up the red ball", "go to the red ball"


def test_drops_in_its_own_cell_where_there_is_no_other():
    held = (KEY, 4)
    assert on_map("### #O# #.# #^# ###", BALL_MISSION, held) == "forward"
    # Out of the cell and turned round: the cell left is the one to drop in.
    assert on_map("### #.# #^# #O# ###", BALL_MISSION, held) == "drop"
    # With no cell to drop in at all there is no advice.
    assert on_map("### #O# #^# ###", BALL_MISSION, held) is None


@pytest.mark.parametrize(
    ("mission", "at_the_box"),
    [(GO_MISSION, "pickup"), (BALL_MISSION, "toggle"), ("get to the goal", "toggle")],
)
def test_takes_up_what_bars_a_door_or_the_unseen(mission, at_the_box):
    assert on_map("##### ?.D.# ###B# #..^# #####", mission) == at_the_box
    bend = "######## #?.....# ######.# ######k# ######.# ######^# ########"
    assert on_map(bend, mission) == "forward"


def test_missions_to_go_to_something_unlock_doors_last():
    assert on_map("#L### #..K# #..^# #####", GO_MISSION) == "pickup"
    assert on_map("#.L#? #..^? #.K.# #####", GO_MISSION) == "right"  # the unseen comes first
    assert on_map("###L# #..^# #####", GO_MISSION, (KEY, 4)) == "toggle"
    # Fetch ends with the first object taken up, and GoToObject with the first box opened.
    assert on_map("#L### #..K# #..^# #####", "get a red ball") is None
    assert on_map("##### #..B# #..^# #####", GO_MISSION) is None


def test_changes_the_key_of_a_barred_door_for_that_of_a_free_one():
    barred, free = "#l### #O.K# #..^# ##L##", "#l### #O..# #..^# #####"
    assert on_map(barred, "get to the goal", (KEY, 2)) != "pickup"
    # The blue door is barred by the ball: the blue key goes down, the ball comes up.
    assert on_map(free, "get to the goal", (KEY, 2)) == "drop"


def test_puts_down_what_the_mission_says_to_go_to():
    assert on_map("##### #...# #..^# #####", GO_MISSION, (BALL, 0)) == "drop"
    assert on_map("##### #...# #..^# #####", GO_MISSION, (BALL, 2)) is None


def test_opens_boxes_where_nothing_else_is_left():
    assert on_map("#L### #..B# #..^# #####", "get to the goal") == "toggle"
    assert on_map("#L### #...# #..^# #####", "get to the goal", (BOX, 5)) == "drop"
    # Not into a doorway, where it would bar the way to the door.
    assert on_map("###L# #...# #..^# #####", "get to the goal", (BOX, 5)) != "drop"
    assert on_map("#L### #..B# #..K# #..^# #####", "get to the goal") == "pickup"


def test_with_nothing_left_to_do_there_is_no_advice():
    assert on_map("##### #...# #..^# #####", "get to the goal") is None
    # A turn shows what lies beyond lava, not what lies beyond a wall or a door.
    assert on_map("####### #^~~??# #######", "get to the goal") == "right"
    assert on_map("####### #^~#??# #######", "get to the goal") is None
    assert on_map("####### #^~L??# #######", "get to the goal") is None


def test_solves_doorkey_5x5_without_memory_from_few_keys():
    wins, keys = solved("MiniGrid-DoorKey-5x5-v0", memory=False)
    assert wins >= 95 and keys < 215


@pytest.mark.parametrize("memory", [False, True])
def test_values_count_the_steps_left(memory):
    advice = values(observation([((3, 3), (GOAL, 1, 0))]), memory=memory)
    assert advice["forward"] == -2.0
    assert advice["toggle"] == advice["done"] == -3.0
    assert advice["right"] == -4.0 and advice["left"] == -4.25
    assert advice["forward"] > max(advice["left"], advice["right"])


def test_sub_goals_in_order():
    key, door = ((3, 5), (KEY, 4, 0)), ((3, 5), (DOOR, 4, LOCKED))
    assert best(observation([key])) == "pickup"
    assert best(observation([door], held=(KEY, 4))) == "toggle"
    assert best(observation([door, ((4, 6), (KEY, 4, 0))])) == "right"
    # A key of another color does not open the door and is put down for the right one.
    wrong = observation([door, ((4, 6), (KEY, 4, 0))], held=(KEY, 1))
    assert values(wrong)["toggle"] < 0.0
    assert best(observation([door], held=(KEY, 4), mission="open the door")) == "toggle"


def test_lava_is_worst():
    seen = observation([((3, 5), (LAVA, 0, 0)), ((3, 3), (GOAL, 1, 0))])
    advice = values(seen)
    assert min(advice, key=advice.get) == "forward"
    assert best(seen) in ("left", "right")


def test_dropping_the_key_before_the_door_costs():
    advice = values(observation([((3, 3), (DOOR, 4, LOCKED))], held=(KEY, 4)))
    assert advice["drop"] < advice["done"]


def test_without_memory_and_nothing_to_do_it_turns_right():
    walls = [((c, 5), (WALL, 5, 0)) for c in range(7)]
    walls += [((2, 6), (WALL, 5, 0)), ((4, 6), (WALL, 5, 0))]
    assert best(observation(walls)) == "right"


@pytest.mark.parametrize(
    "mission",
    [
        "go to the matching object at the end of the hallway",
        "put the blue ball near the red key",
        "go to the red ball and open the blue door",
        "",
        "open the box",
    ],
)
def test_missions_not_covered_get_no_advice(mission):
    describer = MiniGridDescriber()
    request = describer.request(0, observation(mission=mission))
    assert MiniGridPlanner()(request) is None


def test_requests_of_other_describers_get_no_advice():
    assert MiniGridPlanner()(AdviceRequest("text", ("a", "b"), "key")) is None


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(0, 9), st.integers(0, 2))),
    st.sampled_from([None, 5, 6, 7]),
    st.booleans(),
    st.sampled_from([GET_GOAL, "pick up the red ball", "open the door"]),
)
def test_any_view_gets_finite_values(things, held, memory, mission):
    seen = observation(
        [((column, row), (kind, 0, state)) for column, row, kind, state in things],
        held=None if held is None else (held, 0),
        mission=mission,
    )
    if held is None:
        seen["image"][3, 6] = (EMPTY, 0, 0)
    advice = values(seen, memory=memory)
    assert len(advice) == 7 and np.isfinite(list(advice.values())).all()


def test_describer_speaks_the_protocol_and_matches_the_recorded_form():
    describer = MiniGridDescriber()
    assert isinstance(describer, Describer)
    seen = observation(
        [((4, 5), (DOOR, 4, LOCKED)), ((2, 4), (GOAL, 1, 0))], held=(KEY, 4), mission="find it"
    )
    text = describer.request(0, seen).description
    assert "Mission: find it" in text
    assert "#.G...#\n#...L.#\n#..^..#" in text
    assert "yellow door (locked): 1 ahead, 1 to the right; goal: 2 ahead, 1 to the left" in text
    assert "In front of you: empty" in text and "You carry: yellow key" in text
    assert all(f"- {action}: " in text for action in ACTIONS)


def test_cache_key_is_canonical():
    describer = MiniGridDescriber()
    key = describer.cache_key(0, observation())
    assert key == describer.cache_key(3, observation(direction=2))
    assert key == describer.request(0, observation()).cache_key
    assert key != describer.cache_key(0, observation(held=(KEY, 4)))
    assert key != describer.cache_key(0, observation(mission="reach the goal"))


def test_memory_is_kept_by_row_and_forgotten_at_reset():
    describer = MiniGridDescriber(memory=True)
    with pytest.raises(RuntimeError, match="Row 0"):
        describer.cache_key(0, observation())
    plain, goal = observation(), observation([((3, 4), (GOAL, 1, 0))])
    describer.observe(0, goal, None, reset=True)
    describer.observe(1, plain, None, reset=True)
    fresh = describer.cache_key(1, plain)
    # Turned away into the dark, row 0 remembers the goal: two behind.
    dark = {**plain, "image": np.zeros((7, 7, 3), dtype=np.uint8)}
    for direction in (1, 2):
        dark["direction"] = np.array([direction])
        describer.observe(0, dark, 1, reset=False)
    turned = describer.request(0, dark)
    assert "goal: 2 behind" in turned.description
    assert turned.cache_key != fresh
    describer.observe(0, plain, None, reset=True)
    assert describer.cache_key(0, plain) == fresh


def test_a_view_of_the_wrong_shape_fails():
    with pytest.raises(ValueError, match=r"\(7, 5, 3\)"):
        MiniGridDescriber().cache_key(0, {"image": np.zeros((7, 5, 3)), "mission": ""})


def abstract_state(things, mission="", *, carrying=None):
    """The abstract state of an empty view with things at columns and rows of it."""
    view = np.ones((7, 7, 3), dtype=np.uint8)
    view[..., 1:] = 0
    for cell, thing in things.items():
        view[cell] = thing
    if carrying is not None:
        view[3, 6] = carrying
    seen = {"image": view, "direction": np.array([0]), "mission": mission}
    return MiniGridDescriber().abstract_state(0, seen)


RED, BLUE, YELLOW = 0, 2, 4


def test_the_abstract_state_forgets_distance_within_a_band_and_most_of_color():
    key = (KEY, YELLOW, 0)
    assert abstract_state({(3, 4): key}) == abstract_state({(3, 3): key})  # 2 and 3 ahead
    assert abstract_state({(3, 4): key}) == abstract_state({(3, 4): (KEY, RED, 0)})
    different = ({(3, 5): key}, {(3, 2): key}, {(2, 4): key}, {(3, 4): (BALL, YELLOW, 0)}, {})
    assert len({abstract_state(things) for things in ({(3, 4): key}, *different)}) == 6
    two = {(3, 4): key, (0, 0): (BALL, RED, 0)}
    assert abstract_state(two) != abstract_state({(3, 4): key})
    assert abstract_state({(3, 5): (WALL, 5, 0), (1, 1): key}) != abstract_state({(1, 1): key})


def test_the_abstract_state_knows_what_the_mission_names():
    ball, box = (BALL, RED, 0), (BOX, BLUE, 0)
    for mission, named in (
        ("go to the red ball", ball),
        ("pick up a box", box),
        ("get the blue object", box),
        ("fetch a red ball", ball),
    ):
        other = box if named is ball else ball
        for place in ((1, 1), (3, 4)):
            alone = abstract_state({place: named}, mission)
            assert abstract_state({place: named, (5, 5): other}, mission) == alone, mission
    # The same question in other colors; a thing of another color is not what is meant.
    red, blue = abstract_state({(1, 1): ball}, "go to the red ball"), {(1, 1): (BALL, BLUE, 0)}
    assert (
        red
        == abstract_state(blue, "go to the blue ball")
        != abstract_state(blue, "go to the red ball")
    )
    mission = "use the key to open the door and then get to the goal"
    locked, key, goal = (DOOR, YELLOW, LOCKED), (KEY, YELLOW, 0), (GOAL, 1, 0)
    ball_too = {(2, 4): locked, (1, 1): key, (5, 5): goal, (6, 6): ball}
    assert abstract_state(ball_too, mission) == (
        f"{mission}||empty|locked named door -1 1|named goal 1 1|named key -1 2"
    )
    # Lava counts beside what is named and beside what is not.
    lava = (LAVA, 0, 0)
    assert abstract_state({(1, 1): lava, (5, 5): goal}, mission).endswith(
        "|lava -1 2|named goal 1 1"
    )
    assert abstract_state({(1, 1): lava, (5, 5): ball}, mission).endswith("|ball 1 1|lava -1 2")
    # What fits is known by its color.
    fits = abstract_state({(3, 5): locked}, carrying=(KEY, YELLOW, 0))
    assert fits == "|key|locked fitting door|locked fitting door 0 0"
    other = abstract_state({(3, 5): locked}, carrying=(KEY, RED, 0))
    assert other == "|key|locked door|locked door 0 0"


def test_the_abstract_state_tells_the_colors_of_a_mission_apart():
    mission = "open the {} door, then open the {} door"
    red, blue = (DOOR, RED, CLOSED), (DOOR, BLUE, CLOSED)
    one = abstract_state({(3, 5): red, (1, 1): blue}, mission.format("red", "blue"))
    # Its reverse asks for the opposite action; in other colors it is the same question.
    assert one != abstract_state({(3, 5): red, (1, 1): blue}, mission.format("blue", "red"))
    assert one == abstract_state({(3, 5): blue, (1, 1): red}, mission.format("blue", "red"))
    assert one.startswith("open the c1 door, then open the c2 door||closed named c1 door|")


@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-5x5-v0", "MiniGrid-DoorKey-8x8-v0"])
def test_a_followed_plan_solves_a_level_in_few_questions(env_id):
    env = gym.make(env_id, disable_env_checker=True)
    describer, planner = MiniGridDescriber(memory=True), MiniGridPlanner()
    wins = questions = steps = 0
    for episode in range(10):
        seen, _ = env.reset(seed=row_seed(0, episode, evaluation=True))
        describer.observe(0, seen, None, reset=True)
        plan, ended, reward = [], False, 0.0
        while not ended:
            if not plan:
                request = describer.request(0, seen)
                plan = planner.plan(request, 16) or [int(np.argmax(planner(request)))]
                questions += 1
            action = plan.pop(0)
            seen, reward, terminated, truncated, _ = env.step(action)
            describer.observe(0, seen, action, reset=False)
            ended, steps = terminated or truncated, steps + 1
        wins += reward > 0
    assert wins == 10 and questions * 3 < steps


def test_a_plan_ends_with_the_mission():
    seen = observation([((3, 3), (GOAL, 1, 0))])
    describer = MiniGridDescriber()
    describer.observe(0, seen, None, reset=True)
    plan = MiniGridPlanner().plan(describer.request(0, seen), 16)
    assert [ACTIONS[action] for action in plan] == ["forward"] * 3


@pytest.mark.parametrize("env_id", ["MiniGrid-DoorKey-8x8-v0", "MiniGrid-KeyCorridorS3R1-v0"])
def test_the_valid_actions_are_those_that_change_the_world(env_id):
    env = gym.make(env_id, disable_env_checker=True)
    describer, planner = MiniGridDescriber(), MiniGridPlanner()
    generator = np.random.default_rng(0)
    for episode in range(5):
        seen, _ = env.reset(seed=episode)
        describer.observe(0, seen, None, reset=True)
        for _ in range(60):
            found = planner.valid_actions(describer.request(0, seen))
            mask = valid_actions(torch.as_tensor(seen["image"])).tolist()
            assert found == mask
            action = int(generator.choice(np.flatnonzero(mask)))
            seen, _, ended, _, _ = env.step(action)
            describer.observe(0, seen, action, reset=False)
            if ended:
                break


def test_done_is_valid_where_the_mission_ends_with_it_and_unknown_missions_name_nothing():
    env = gym.make("MiniGrid-GoToDoor-5x5-v0", disable_env_checker=True)
    describer, planner = MiniGridDescriber(memory=True), MiniGridPlanner()
    seen, _ = env.reset(seed=0)
    describer.observe(0, seen, None, reset=True)
    claims, best = [], None
    while best != "done":
        request = describer.request(0, seen)
        best = request.actions[int(np.argmax(planner(request)))]
        claims.append(planner.valid_actions(request)[request.actions.index("done")])
        seen, *_ = env.step(request.actions.index(best))
        describer.observe(0, seen, request.actions.index(best), reset=False)
    assert claims == [False] * (len(claims) - 1) + [True] and len(claims) > 1
    seen = {**seen, "mission": "dance, then sing"}
    describer.observe(0, seen, None, reset=True)
    assert planner.valid_actions(describer.request(0, seen)) == []


def test_the_planner_names_subgoals_that_are_then_reached():
    """In DoorKey: the key is taken, the door opened, the goal faced, in this order."""
    env = gym.make("MiniGrid-DoorKey-8x8-v0", disable_env_checker=True)
    describer, planner = MiniGridDescriber(memory=True), MiniGridPlanner()
    for episode in range(3):
        seen, _ = env.reset(seed=row_seed(0, episode, evaluation=True))
        describer.observe(0, seen, None, reset=True)
        named, reached, ended = [], [], False
        while not ended:
            request = describer.request(0, seen)
            subgoal = planner.subgoal(request)
            assert subgoal in request.subgoals == describer.subgoals
            named += [subgoal] * (subgoal not in named[-1:])
            action = int(np.argmax(planner(request)))
            seen, _, terminated, truncated, _ = env.step(action)
            describer.observe(0, seen, action, reset=False)
            ended = terminated or truncated
            reached += [subgoal] * (subgoal in describer.reached(0, seen))
        for subgoals in (named, list(dict.fromkeys(reached))):
            wanted = ["hold the key", "open the locked door", "face the goal"]
            assert [name for name in subgoals if name in wanted] == wanted
