"""Run the ablations A to F of ``configs/ablation`` over seeds: ``study.py study=ablation``.

python examples/ablate.py experiments=[doorkey5x5] seeds=3
python examples/ablate.py study=parts        # LoRe without each of its parts
"""

from __future__ import annotations

import sys

from lore_torchrl.advisors.redaction import redact_output
from study import main

if __name__ == "__main__":
    if not any(word.startswith("study=") for word in sys.argv[1:]):
        sys.argv.append("study=ablation")
    redact_output()
    sys.exit(main())
