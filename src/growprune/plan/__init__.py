"""Plans: the phases of a sparsification method, as values that can be listed any number of times.

A *phase* is a few edits of the masks, then some training. There are two edits: `prune` a part and `grow` a part. Each
goes to a sparsity, or by a share of the part's live weights. A phase costs only its edits, so a method may yield one
every few iterations. In a *fork*, several machines start from the same model. Each trains its own phase and returns one
part. A method consists of nothing else.

A plan builds values and changes nothing. It can be listed, printed, costed and tested without a model, a GPU or torch.
Resuming skips the phases that are done.
"""

from growprune.plan.phases import Action as Action
from growprune.plan.phases import Branch as Branch
from growprune.plan.phases import By as By
from growprune.plan.phases import Declaration as Declaration
from growprune.plan.phases import Edit as Edit
from growprune.plan.phases import Fork as Fork
from growprune.plan.phases import InitialMask as InitialMask
from growprune.plan.phases import Part as Part
from growprune.plan.phases import Parts as Parts
from growprune.plan.phases import Phase as Phase
from growprune.plan.phases import Plan as Plan
from growprune.plan.phases import Rule as Rule
from growprune.plan.phases import ScheduledPhase as ScheduledPhase
from growprune.plan.phases import Score as Score
from growprune.plan.phases import Spread as Spread
from growprune.plan.phases import Stage as Stage
from growprune.plan.phases import declaration_of as declaration_of
from growprune.plan.phases import first_by as first_by
from growprune.plan.phases import grow as grow
from growprune.plan.phases import method as method
from growprune.plan.phases import next_edits as next_edits
from growprune.plan.phases import parse_choice as parse_choice
from growprune.plan.phases import prune as prune
from growprune.plan.phases import walk as walk
