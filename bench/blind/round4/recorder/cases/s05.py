from own2 import *


class Run(Game):
    seed = 7

    def context(self, prompt, turns, replies):
        out = list(prompt)
        for turn, reply in zip(turns, replies):
            out += [t for t in turn if t != self.NOTE] + self.render(reply)
        return out

    def prove(self):
        first, later = [h["gap_first"] for h in self.history], [h["gap_later"] for h in self.history]
        assert max(first) < 1e-4 and min(later) > 0.02, (first, later)
        return {"gap_first_turn": first, "gap_later_turns": later}


Run().main()
