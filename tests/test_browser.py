"""The page in headless Chromium, as a person uses it: open, search, unfold, click, type, look.

`make zoo` installs Chromium, its driver and selenium. Pictures of what was seen are left in REPLAYLENS_SCREENSHOTS,
where that names a folder.
"""

import os
import shutil
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

import replaylens as rl

CHROMIUM, DRIVER = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")

try:
    from selenium import webdriver
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None

pytestmark = [
    pytest.mark.zoo,
    pytest.mark.skipif(
        not (CHROMIUM and DRIVER and webdriver),
        reason="no headless browser: needs chromium, chromedriver (apt install chromium chromium-driver) and selenium",
    ),
]

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1400,900"):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    made = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Open the page of a program, and see that nothing went wrong on it."""

    def open_page(prog, size=(1400, 900), **options):
        browser.set_window_size(*size)
        browser.get(prog.page(tmp_path / "page.html", **options).as_uri())
        browser.execute_script("localStorage.clear()")
        assert browser.find_element(By.TAG_NAME, "html").get_attribute("data-ready") == "yes"
        return browser

    browser.get("about:blank")
    browser.get_log("browser")
    yield open_page
    assert [row for row in browser.get_log("browser") if row["level"] == "SEVERE"] == []


@pytest.fixture(scope="module")
def residuals():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(nn.Sequential(Residual(), Residual()) for _ in range(12)))
    return rl.capture(model, torch.rand(1, 8))


@pytest.fixture(scope="module")
def convolutions():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 4, 1), nn.Softmax(-1))).eval()
    return rl.capture(model, torch.rand(1, 1, 8, 8))


def names_in_picture(browser):
    return [
        one.get_attribute("aria-label").split(",")[0]
        for one in browser.find_elements(By.CSS_SELECTOR, "#picture .thing")
    ]


def thing(browser, name):
    return browser.find_element(By.CSS_SELECTOR, f'#picture .thing[aria-label^="{name},"]')


def heading(browser):
    return browser.find_element(By.CSS_SELECTOR, "#card h2").text


def keep(browser, name):
    if folder := os.environ.get("REPLAYLENS_SCREENSHOTS"):
        browser.save_screenshot(str(Path(folder) / f"{name}.png"))


def press(browser, *keys):
    ActionChains(browser).send_keys(*keys).perform()


# -- folding ----------------------------------------------------------------------------------------------------------


def test_a_large_model_opens_folded_and_unfolds(opened, residuals):
    browser = opened(residuals)
    before = names_in_picture(browser)
    inside = {layer.label for layer in residuals.find(module="12.1")}
    assert "module 12.1" in before and not inside & set(before)
    press(browser, "/", "@12.1", Keys.ENTER)
    thing(browser, "module 12.1").find_element(By.CSS_SELECTOR, "[data-twist]").click()
    assert set(names_in_picture(browser)) == set(before) | inside
    browser.find_element(By.ID, "unfold").click()
    assert set(residuals.layer_labels) <= set(names_in_picture(browser))
    browser.find_element(By.ID, "fold").click()
    assert set(names_in_picture(browser)) == {
        "input_1_0",
        "linear_1_1",
        *(f"module {n}" for n in range(1, 13)),
        "output_1_98",
    }


def test_nothing_lies_over_anything_else(opened, residuals):
    browser = opened(residuals)
    browser.find_element(By.ID, "unfold").click()
    boxes = browser.execute_script(
        "return [...DRAWN.world.boxes].filter(([, box]) => !box.isOpen).map(([, b]) => [b.x, b.y, b.w, b.h])"
    )
    assert len(boxes) == len(residuals)
    for n, (x, y, w, h) in enumerate(boxes):
        for a, b, c, d in boxes[n + 1 :]:
            assert x + w <= a or a + c <= x or y + h <= b or b + d <= y


def test_every_line_goes_down_from_what_is_read_to_what_reads_it(opened, residuals):
    browser = opened(residuals)
    browser.find_element(By.ID, "unfold").click()
    lines = browser.execute_script("return DRAWN.arrows.map((one) => one.points)")
    assert len(lines) == sum(len(layer.parents) for layer in residuals)
    for points in lines:
        assert all(one[1] <= other[1] + 1e-6 for one, other in pairwise(points))


def test_lines_pass_by_what_they_do_not_read(opened, residuals):
    browser = opened(residuals)
    browser.find_element(By.ID, "unfold").click()
    hits = browser.execute_script("""
        const boxes = [...DRAWN.world.boxes].filter(([, box]) => !box.isOpen);
        return DRAWN.arrows.flatMap((arrow) => {
            const length = arrow.line.getTotalLength(), found = new Set();
            for (let at = 0; at <= length; at += 3) {
                const { x, y } = arrow.line.getPointAtLength(at);
                for (const [key, b] of boxes)
                    if (key !== arrow.from && key !== arrow.to && x > b.x + 1 && x < b.x + b.w - 1 && y > b.y + 1 && y < b.y + b.h - 1)
                        found.add(key);
            }
            return [...found].map((key) => [arrow.from, arrow.to, key]);
        });
    """)
    assert hits == []


# -- searching --------------------------------------------------------------------------------------------------------


def test_a_search_finds_what_is_folded_and_shows_it(opened, residuals):
    browser = opened(residuals)
    target = next(layer.label for layer in residuals if layer.module == "12.1.two")
    assert target not in names_in_picture(browser)
    press(browser, "/", "12.1.two")
    found = browser.find_elements(By.CSS_SELECTOR, "#results .choice")
    assert found[0].text.split()[0] == target
    press(browser, Keys.ENTER)
    assert heading(browser) == target
    assert "chosen" in thing(browser, target).get_attribute("class")
    box, stage = thing(browser, target).rect, browser.find_element(By.ID, "stage").rect
    assert stage["x"] < box["x"] and box["x"] + box["width"] < stage["x"] + stage["width"]
    assert stage["y"] < box["y"] and box["y"] + box["height"] < stage["y"] + stage["height"]


@pytest.mark.parametrize(
    ("words", "first"), [("relu_3", "relu_3_11"), ("relu", "relu_1_3"), ("@5.1", "@5.1"), ("RESIDUAL 7.0", "@7.0")]
)
def test_a_search_takes_labels_operations_modules_and_classes(opened, residuals, words, first):
    browser = opened(residuals)
    press(browser, "/", words)
    assert browser.find_elements(By.CSS_SELECTOR, "#results .choice")[0].text.split()[0] == first


def test_a_search_for_nothing_that_is_there_says_so(opened, residuals):
    browser = opened(residuals)
    press(browser, "/", "nosuchthing")
    assert browser.find_element(By.ID, "results").text == "Nothing has this name."
    press(browser, Keys.ESCAPE)
    assert not browser.find_element(By.ID, "results").is_displayed()


# -- cards ------------------------------------------------------------------------------------------------------------


def test_a_click_shows_a_layers_card_and_its_links_lead_on(opened, convolutions):
    browser = opened(convolutions)
    thing(browser, "relu_1_2").click()
    card = browser.find_element(By.ID, "card")
    assert heading(browser) == "relu_1_2"
    assert "float32[1, 4, 6, 6]" in card.text and "Value: 144 numbers" in card.text
    assert len(card.find_elements(By.CSS_SELECTOR, "svg.histogram rect")) == 24
    assert len(card.find_elements(By.TAG_NAME, "canvas")) == 4
    card.find_element(By.XPATH, ".//h3[text()='Parents']/following-sibling::div[1]/button").click()
    assert heading(browser) == "conv2d_1_1"
    assert browser.current_url.endswith("#conv2d_1_1")


def test_a_feature_map_is_painted_number_for_number(opened, convolutions):
    browser = opened(convolutions)
    thing(browser, "relu_1_2").click()
    painted = browser.execute_script("""
        const canvas = document.querySelectorAll("#card canvas")[1];
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        return [...data].filter((_, n) => n % 4 === 0);
    """)
    value = convolutions["relu_1"].value[0]
    assert torch.equal(torch.tensor(painted), (value[1] / value.max() * 255).round().long().flatten())


def test_an_address_of_a_page_can_name_a_layer(opened, residuals):
    browser = opened(residuals)
    url = browser.current_url.split("#")[0]
    browser.get("about:blank")
    browser.get(f"{url}#relu_24_95")
    assert heading(browser) == "relu_24_95"


def test_an_address_of_a_page_can_name_all_passes_of_a_layer(opened):
    cell = nn.Linear(3, 3)
    browser = opened(rl.capture(lambda x: cell(cell(x).relu()).relu(), torch.rand(1, 3)), rolled=True)
    url = browser.current_url.split("#")[0]
    browser.get("about:blank")
    browser.get(f"{url}#relu_1_2")
    assert heading(browser) == "relu_1_2:1"


def test_what_is_not_finite_is_coloured_as_far_as_can_be(opened):
    prog = rl.capture(nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.ReLU()), nn.Linear(3, 3)), torch.rand(1, 3))
    browser = opened(prog, values={"linear_1": 1.0, "relu_1": float("nan"), "linear_2": float("-inf")})
    fill = lambda name: thing(browser, name).find_elements(By.CSS_SELECTOR, ".box")[-1].get_attribute("style")  # noqa: E731
    hot = fill("relu_1_2")
    assert "var(--hot)" in hot and "var(--cold)" in fill("linear_2_3")
    browser.find_element(By.ID, "fold").click()
    assert fill("module 0") == hot


def test_a_sweep_is_on_the_cards(opened, convolutions):
    sweep = rl.sweep(convolutions, ["relu_1"], "b [c] h w", rl.Zero(), metric=lambda out: out.square().sum())
    browser = opened(convolutions, sweep=sweep)
    thing(browser, "relu_1_2").click()
    assert len(browser.find_elements(By.CSS_SELECTOR, "#card .bars tr")) == 4
    assert browser.find_element(By.ID, "legend").text.startswith("change of the metric")


def test_names_from_the_model_are_shown_and_never_run(opened):
    name = "<img src=x onerror=document.title=1>"
    box = type(name, (nn.Sequential,), {})(nn.Linear(2, 2), nn.ReLU())
    browser = opened(rl.capture(nn.Sequential(box), torch.rand(1, 2)))
    press(browser, "/", "@0", Keys.ENTER)
    assert name in browser.find_element(By.ID, "card").text
    assert browser.find_elements(By.TAG_NAME, "img") == []
    assert browser.title == "Sequential"


# -- by keyboard ------------------------------------------------------------------------------------------------------


def test_the_graph_is_walked_by_keys(opened, convolutions):
    browser = opened(convolutions)
    thing(browser, "input_1_0").click()
    for expected in ("conv2d_1_1", "relu_1_2"):
        press(browser, Keys.ARROW_DOWN)
        assert heading(browser) == expected
    press(browser, Keys.ARROW_UP)
    assert heading(browser) == "conv2d_1_1"
    assert browser.switch_to.active_element.get_attribute("aria-label").startswith("conv2d_1_1")
    press(browser, Keys.ESCAPE)
    assert heading(browser) == "Sequential"


def test_the_list_of_modules_is_a_tree_for_keys(opened, residuals):
    browser = opened(residuals)
    browser.find_element(By.ID, "fold").click()
    browser.find_element(By.CSS_SELECTOR, '[role="treeitem"][aria-expanded]').click()
    press(browser, Keys.TAB)  # from the card's place in the picture into the page, and back to the list
    row = browser.find_element(By.CSS_SELECTOR, '[role="treeitem"][aria-expanded="false"]')
    browser.execute_script("arguments[0].focus()", row)
    press(browser, Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element.get_attribute("aria-expanded") == "true"
    press(browser, Keys.ARROW_DOWN, Keys.ENTER)
    assert heading(browser) == "@1.0"
    press(browser, Keys.ARROW_LEFT)
    assert browser.switch_to.active_element.text.startswith("▾\n@1") or "@1" in browser.switch_to.active_element.text


def test_keys_and_the_wheel_zoom_and_a_drag_pans(opened, convolutions):
    browser = opened(convolutions)
    view = lambda: browser.execute_script("return [VIEW.x, VIEW.y, VIEW.scale]")  # noqa: E731
    start = view()
    press(browser, "+")
    assert view()[2] == pytest.approx(start[2] * 1.25)
    press(browser, "-")
    assert view() == pytest.approx(start)
    stage = browser.find_element(By.ID, "picture")
    ActionChains(browser).move_to_element_with_offset(stage, -250, 0).click_and_hold().move_by_offset(
        40, 30
    ).release().perform()
    assert view()[:2] == pytest.approx([start[0] + 40, start[1] + 30])
    browser.execute_script("svg.dispatchEvent(new WheelEvent('wheel', {deltaY: -200, clientX: 500, clientY: 300}))")
    assert view()[2] > start[2]
    press(browser, "0")
    assert view()[2] <= 1.2


# -- looks ------------------------------------------------------------------------------------------------------------


def test_light_and_dark(opened, convolutions):
    browser = opened(convolutions)
    ground = lambda: browser.execute_script("return getComputedStyle(document.body).backgroundColor")  # noqa: E731
    browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    assert ground() == "rgb(22, 24, 28)"
    browser.find_element(By.ID, "theme").click()
    assert ground() == "rgb(255, 255, 255)"
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("kind", ["alexnet", "gpt2", "resnet"])
def test_real_models_open(opened, kind):
    browser = opened(library_program(kind))
    label = {"alexnet": "relu_3_8", "gpt2": "softmax_1", "resnet": "relu_3"}[kind]
    press(browser, "/", label, Keys.ENTER)
    assert heading(browser).startswith(label)
    assert browser.find_elements(By.CSS_SELECTOR, "#card canvas")
    for theme in ("light", "dark"):
        browser.execute_script(f"setTheme('{theme}')")
        keep(browser, f"{kind}-{theme}")


def library_program(kind):
    torch.manual_seed(0)
    if kind == "alexnet":
        from demo import AlexNet

        return rl.capture(AlexNet().eval(), torch.rand(1, 3, 224, 224))
    import torchvision_ops  # noqa: F401

    if kind == "resnet":
        import torchvision

        return rl.capture(torchvision.models.resnet18().eval(), torch.rand(1, 3, 64, 64))
    import transformers

    config = transformers.GPT2Config(
        n_layer=3,
        n_head=4,
        n_embd=32,
        vocab_size=99,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    return rl.capture(transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 99, (1, 12)), use_cache=False)


def test_a_transformer_of_2000_operations_opens_quickly_in_under_5_megabytes(opened, tmp_path):
    import torchvision_ops  # noqa: F401
    import transformers

    config = transformers.GPT2Config(
        n_layer=48,
        n_head=4,
        n_embd=32,
        vocab_size=99,
        n_positions=32,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    prog = rl.capture(transformers.GPT2LMHeadModel(config).eval(), torch.randint(0, 99, (1, 12)), use_cache=False)
    assert len(prog) > 2000
    browser = opened(prog)
    assert (tmp_path / "page.html").stat().st_size < 5_000_000
    assert len(names_in_picture(browser)) < 150
    browser.find_element(By.ID, "unfold").click()
    assert len(names_in_picture(browser)) > 2000
    keep(browser, "gpt2-2000")
