// One stop for Tab in the picture; arrow keys go to what lies in their direction.

const ARROWS = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1]};

export class Walk {
  constructor(drawing, choose, look) {
    this.drawing = drawing;
    this.at = null;
    const {svg} = drawing;
    const idFrom = event => event.target.closest?.(".item")?.dataset.id ?? null;
    svg.addEventListener("click", event => {
      const id = idFrom(event);
      if (id) {
        this.go(id);
        choose(id);
      }
    });
    svg.addEventListener("focusin", event => {
      const id = idFrom(event);
      if (id) {
        this.stop(id);
        look(id);
      } else if (event.target === svg && this.at) {
        this.go(this.at);
      }
    });
    svg.addEventListener("pointerover", event => drawing.light(idFrom(event) ?? this.at));
    svg.addEventListener("pointerleave", () => drawing.light(this.at));
    svg.addEventListener("keydown", event => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const ids = [...drawing.byId.keys()];
      if (event.key in ARROWS) this.go(this.next(ARROWS[event.key]));
      else if (event.key === "Home") this.go(ids[0]);
      else if (event.key === "End") this.go(ids.at(-1));
      else if (event.key === "Enter" || event.key === " ") choose(this.at);
      else return;
      event.preventDefault();
    });
  }

  // After each drawing: the stop may be gone.
  settle() {
    const {byId, held} = this.drawing;
    if (!byId.has(this.at)) this.at = byId.keys().next().value ?? null;
    for (const [id, group] of held) group.setAttribute("tabindex", id === this.at ? 0 : -1);
  }

  stop(id) {
    this.at = id;
    this.settle();
  }

  go(id) {
    this.stop(id);
    this.drawing.held.get(id)?.focus();
  }

  next([right, down]) {
    const here = this.drawing.byId.get(this.at);
    const middle = each => [each.x + each.w / 2, each.y + each.h / 2];
    const [x, y] = middle(here);
    let best = this.at, least = Infinity;
    for (const [id, each] of this.drawing.byId) {
      const [dx, dy] = [middle(each)[0] - x, middle(each)[1] - y];
      const along = dx * right + dy * down, offset = Math.abs(dx * down) + Math.abs(dy * right);
      // Boxes of one column differ in their middles; that is no step to the side.
      const sideways = right ? offset : Math.max(0, offset - here.w / 2);
      if (along > 4 && along + 2.5 * sideways < least && sideways <= Math.max(4 * along, here.h)) {
        [best, least] = [id, along + 2.5 * sideways];
      }
    }
    if (best === this.at && right) {
      // Nothing at this height: the nearest of the next column.
      for (const [id, each] of this.drawing.byId) {
        const [dx, dy] = [(middle(each)[0] - x) * right, Math.abs(middle(each)[1] - y)];
        if (dx > here.w / 2 && dx * 4 + dy < least) [best, least] = [id, dx * 4 + dy];
      }
    }
    return best;
  }
}
