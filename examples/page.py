"""Write the page shown in docs/page.md: what changes in a small trained transformer when one letter of its input changes.

python examples/page.py                          writes demo_page.html
python examples/page.py docs/pictures/page.png   also takes a screenshot with headless Chromium
"""

import shutil
import subprocess
import sys
from pathlib import Path

from small_models import induction, pair, words

import replaylens as rl

page, picture = Path("demo_page.html"), sys.argv[1] if len(sys.argv) > 1 else None

both = pair()
prog = rl.capture(induction(), both.clean).expand("scaleddotproductattention")  # to make the patterns visible
run = prog.replay(both.corrupt)
print(f"recorded: {words(both.clean)}\nreplayed: {words(both.corrupt)}\n")
print(run.diff())

run.page(page)
print(f"\n{page}: {page.stat().st_size / 1e3:.0f} KB. Open it in a browser.")

if picture is not None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("No picture: Chromium is not installed.")
    command = [chromium, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1240,640"]
    subprocess.run(
        [*command, f"--screenshot={picture}", f"{page.absolute().as_uri()}#{prog['pattern_2'].label}"],
        check=True,
        capture_output=True,
    )
    print(f"Screenshot: {picture}")
