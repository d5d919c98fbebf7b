"""Words that documents are made of: names of things, people, rooms and topics."""

from __future__ import annotations

from da_jax.evals.offline.stream import Stream

QUALITIES = tuple(
    "agile ancient bashful blunt bold brave brief bright brisk broad calm candid careful cheap "
    "clean clever clumsy cold crisp curious dainty damp daring dim dizzy dry dull eager early "
    "easy empty exact faint fancy fast fierce firm flat fond frail free fresh gentle giant glad "
    "grand grave handy happy hasty heavy hollow honest humble idle jolly keen kind large late "
    "lazy level light little lively lonely long loud lucky merry mild modest narrow neat noble "
    "odd patient plain polite proud quick quiet rapid rare ready rough round rusty shy silent "
    "simple sleepy slow small smooth solid stern strange strong sturdy subtle sudden sweet "
    "swift tall tame tidy tiny tough vivid warm weary wide wild wise witty young".split()
)
MATTERS = tuple(
    "amber ash bamboo beige birch black blue brass brick bronze brown canvas cedar chalk cherry "
    "clay cobalt copper coral cork cotton cream crimson crystal ebony elm emerald enamel felt "
    "flint glass gold granite gray green hazel indigo iron ivory jade khaki lace leather lilac "
    "lime linen maple marble maroon mauve nickel oak ochre olive orange paper pearl pewter pine "
    "pink plaster purple quartz red rubber ruby sage salmon sand scarlet silk silver slate "
    "steel straw tan teal tin turquoise velvet violet walnut white willow wool yellow zinc".split()
)
THINGS = tuple(
    "anchor anvil apron arch arrow awning axle badge bagpipe banjo banner barrel basin basket "
    "beacon bell bench bicycle blanket boat bolt bonnet bottle bowl box bracket bridge broom "
    "brush bucket button cabinet cage camera candle canoe carpet cart cello chain chair chest "
    "chimney clock coat coin compass crate crown cup curtain cushion desk dial dish door drum "
    "easel engine fan feather fence ferry fiddle flag flute fork fountain frame funnel gate "
    "gear glove goblet guitar hammer harp hat helmet hinge hook horn jar jug kettle key kite "
    "knife ladder lamp lantern lever lid lock locket loom magnet mallet map mask medal mirror "
    "mug nail needle net notebook oar organ oven paddle pan parcel pebble pen pencil piano "
    "pillow pipe pitcher plate plough pocket pot pulley pump purse quill quilt raft rake ribbon "
    "ring rope rudder saddle sail saw scarf screen shelf shield shovel sieve sledge spade spoon "
    "spring stamp statue stool stove table tent thimble tile torch tower trumpet tunnel "
    "umbrella urn valve vase violin wagon wheel whistle window wrench".split()
)
NAMES = len(QUALITIES) * len(MATTERS) * len(THINGS)
"""How many names of things `name` has."""

FIRST_NAMES = tuple(
    "Wendy Gordon Brenda Kevin Sheila Derek Fiona Howard Ingrid Trevor Nadia Oscar Priya "
    "Quentin Rosalind Stanley Tamsin Ulrich Vivian Walter Yvonne Zelda Bertram Clarice".split()
)
_SURNAMES = (
    "Hargrove Ellison Pruett Okafor Lindqvist Marlowe Castellan Dunmore Faulkner Abernathy "
    "Whitlock Rousseau Tanaka Bergstrom Novak Sinclair Valdez Kessler Thornbury Moreau Ashdown "
    "Pemberton Granger Ibarra"
).split()
PEOPLE = tuple(f"{first} {last}" for first, last in zip(FIRST_NAMES, _SURNAMES))
ROOMS = ("kitchen", "garage", "library", "office", "attic", "cellar", "nursery", "workshop")
CITIES = tuple(
    "Oslo Lisbon Prague Turin Dublin Geneva Vienna Krakow Porto Malmo Ghent Bergen Seville "
    "Zagreb Riga Tallinn Bruges Verona Leipzig Utrecht".split()
)
MONTHS = tuple(
    "January February March April May June July August September October November December".split()
)
TOPICS = tuple(
    "badgers beetles bridges bread butterflies camels castles caves cheese clocks clouds comets "
    "deserts dolphins donkeys dragons eagles falcons ferries foxes frogs geese glaciers gloves "
    "harbours hedgehogs herons honey islands kites lanterns lighthouses lizards marbles meadows "
    "mirrors moths mountains mushrooms otters owls pelicans penguins planets puppets rabbits "
    "rain ravens rivers robots sailors salmon shadows snails snow spiders squirrels storms "
    "tapirs tigers trains turtles violins volcanoes walruses whales windmills winter wolves "
    "zebras".split()
)


def name(index: int) -> str:
    """The name of a thing, such as quiet-copper-anchor; another for each of NAMES indices."""
    index, thing = divmod(index, len(THINGS))
    quality, matter = divmod(index, len(MATTERS))
    return f"{QUALITIES[quality]}-{MATTERS[matter]}-{THINGS[thing]}"


def names(stream: Stream, n: int) -> list[str]:
    """`n` names of things, no two the same."""
    return [name(i) for i in stream.distinct(n, NAMES)]
