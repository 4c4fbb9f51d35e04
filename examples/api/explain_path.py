"""From a directory of manifests to an explained path and its picture."""

import sys
from pathlib import Path

import narthex

manifests, picture = sys.argv[1:]
shop = narthex.load(manifests, node="node-a", cluster_cidr="10.244.0.0/16")
explanation = narthex.trace(shop, "outside", "node-a:30080")
print(explanation)
Path(picture).write_text(explanation.picture("svg"))
