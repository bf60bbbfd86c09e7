"""Common English words by kind: the lexicon of the domains.

Each is one token after a space for the byte-level BPE of small models, so a
prompt's length follows from its number of words.
"""

ANIMALS = tuple(
  """
    cat dog horse cow pig sheep goat lion tiger bear wolf fox deer rabbit
    mouse rat monkey elephant camel snake frog turtle fish whale shark
    seal duck goose hen eagle owl crow bird bee ant spider bat crab donkey
    zebra giraffe kangaroo panda hawk parrot penguin lizard dolphin
    squirrel
    """.split()
)
FOODS = tuple(
  """
    bread rice cheese butter milk egg meat beef soup salad apple
    orange banana grape lemon cherry peach pear plum potato tomato onion
    carrot corn bean pea cake pie cookie sugar salt honey pasta pizza
    garlic pepper nut pumpkin olive mushroom cabbage spinach berry
    sandwich
    """.split()
)
BODY_PARTS = tuple(
  """
    arm leg hand foot head eye ear nose mouth chin neck knee elbow finger
    toe hair tooth tongue shoulder chest back skin bone heart brain lung
    wrist ankle thumb
    """.split()
)
CLOTHES = tuple(
  """
    hat shirt coat dress skirt shoe sock boot glove belt tie jacket cap
    suit jeans
    """.split()
)
VEHICLES = tuple(
  """
    car bus train truck boat ship plane bike taxi van tractor rocket canoe
    """.split()
)
TOOLS = tuple(
  """
    hammer saw drill knife fork spoon axe rake shovel broom brush needle
    scissors ladder rope
    """.split()
)
FURNITURE = tuple(
  """
    table chair bed desk lamp shelf mirror clock carpet curtain door
    window stove
    """.split()
)
COLORS = tuple(
  """
    red blue green yellow black white brown pink purple orange gray gold
    """.split()
)
PLACES = tuple(
  """
    house school church hospital bank hotel library museum office store
    market park farm garden beach island castle bridge tower station
    airport village city kitchen
    """.split()
)
JOBS = tuple(
  """
    doctor nurse teacher farmer lawyer judge soldier pilot driver cook
    baker painter singer actor writer dancer engineer king queen priest
    sailor hunter
    """.split()
)
NATURE = tuple(
  """
    river lake sea ocean mountain hill valley forest desert cave rock
    stone sand sun moon star sky cloud rain snow wind storm fire ice tree
    leaf flower grass root seed
    """.split()
)
THINGS = tuple(
  """
    book paper pen pencil letter map box bag cup plate bowl bottle glass
    key lock coin ring ball toy doll game drum flute piano guitar bell
    candle flag gift card phone radio camera computer screen wheel engine
    stick nail wire pipe glue soap towel blanket pillow
    """.split()
)
ADJECTIVES = tuple(
  """
    big small long short tall wide deep hot cold warm cool new old young
    fast slow loud quiet soft hard heavy light clean dirty dry wet rich
    poor full empty happy sad angry brave calm kind smart strong weak
    sweet sour bitter bright dark flat round sharp smooth rough thick thin
    early late cheap fresh free safe wild
    """.split()
)
VERBS = tuple(
  """
    run walk jump swim fly sing dance read write draw paint eat drink
    sleep wake sit stand climb fall throw catch push pull open close build
    break cut dig plant grow buy sell give take send bring find lose win
    play work rest learn teach help ask answer speak listen watch laugh
    cry smile think dream
    """.split()
)
NAMES = tuple(
  """
    Tom Anna Ben Mary John Lucy Sam Kate Paul Emma Jack Sara Mark Lisa
    Adam Rose Luke Jane Peter Alice David Laura Henry Julia James Clara
    Oscar Maria Robert Helen George Ellen Simon Nina Frank Grace Martin
    Amy Daniel Ruth Carl Eva Leo Max Hugo Vera Ray Joan Karl Diana Eric
    Sophie Victor Emily Alan Judy Walter Linda
    """.split()
)

# Nouns by kind, for questions about what sort of thing a word names.
KINDS = {
  'animal': ANIMALS,
  'food': FOODS,
  'body part': BODY_PARTS,
  'piece of clothing': CLOTHES,
  'vehicle': VEHICLES,
  'job': JOBS,
}
WORDS = tuple(
    sorted(
        {
            *ANIMALS, *FOODS, *BODY_PARTS, *CLOTHES, *VEHICLES, *TOOLS,
            *FURNITURE, *COLORS, *PLACES, *JOBS, *NATURE, *THINGS,
            *ADJECTIVES, *VERBS,
        }
    )
)  # fmt: skip
