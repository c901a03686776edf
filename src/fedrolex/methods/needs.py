"""What a method must be given, and what it goes together with: the columns of the paper's Table 1."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Needs:
    """A method's declaration; a recipe that cannot meet it is refused before anything is trained.

    Attributes:
        public: examples without labels that belong to nobody, at the server.
        validation: a few examples with labels at the server.
        client_state: what every client keeps from round to round.
        uploads: every client's answer by itself, which secure aggregation would hide.
        keys: clients say which rows they want, which tells something about their data.
        one_size: everyone trains a model of the same width.
        larger_server: the server's model may be larger than every client's.
        families: networks of different families can be trained together.
        at_hand: the server reads clients' examples, or what they keep, which a simulation has and real devices do not
            give away.
        apart: whether a client's answer counts must not depend on the others' answers.
    """

    public: bool = False
    validation: bool = False
    client_state: bool = False
    uploads: bool = False
    keys: bool = False
    one_size: bool = False
    larger_server: bool = False
    families: bool = False
    at_hand: bool = False
    apart: bool = False

    @property
    def secure_aggregation(self) -> bool:
        """Whether sums of what clients send are all the server needs."""
        return not (self.uploads or self.keys)
