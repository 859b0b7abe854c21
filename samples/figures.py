"""People drawn around a skeleton: varied clothes and builds, any direction, walking or standing.

Lengths are fractions of the person's height.
"""

from __future__ import annotations

import colorsys
import math
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from samples.skeleton import Point, Pose, Skeleton

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Rgb = tuple[float, float, float]

LIGHT: Rgb = (-0.4, -0.3, 0.86)  # where the light comes from: right, down, towards the camera

# Hue, saturation and value ranges, each 0 to 1; hue may run below 0.
COLOURS: dict[str, tuple[Point, Point, Point]] = {
    "black": ((0.0, 1.0), (0.0, 0.3), (0.03, 0.15)),
    "white": ((0.0, 1.0), (0.0, 0.06), (0.88, 1.0)),
    "grey": ((0.0, 1.0), (0.0, 0.07), (0.36, 0.62)),
    "red": ((-0.025, 0.015), (0.72, 0.95), (0.5, 0.88)),
    "orange": ((0.055, 0.085), (0.8, 1.0), (0.85, 1.0)),
    "yellow": ((0.125, 0.16), (0.65, 0.95), (0.85, 1.0)),
    "green": ((0.27, 0.42), (0.45, 0.9), (0.28, 0.68)),
    "blue": ((0.56, 0.65), (0.5, 0.95), (0.3, 0.85)),
    "purple": ((0.73, 0.80), (0.4, 0.8), (0.35, 0.7)),
    "pink": ((0.89, 0.96), (0.3, 0.6), (0.85, 1.0)),
    "brown": ((0.045, 0.085), (0.45, 0.7), (0.25, 0.45)),
}
COLOUR_NAMES = tuple(COLOURS)
LOWER_KINDS = ("trousers", "shorts", "skirt")
_TOP_WEIGHTS = (3, 2, 2, 2, 1, 1.5, 2, 2.5, 1, 1, 1.5)
_LOWER_WEIGHTS = (3.5, 1, 2, 0.7, 0.3, 0.3, 1, 3.5, 0.4, 0.4, 2)
_BAG_WEIGHTS = (2, 1, 1, 2, 1, 1, 1.5, 1.5, 1, 1, 2)


class Part(IntEnum):
    """What a pixel of a figure shows."""

    NOTHING = 0
    SKIN = 1
    HAIR = 2
    TOP = 3
    LOWER = 4
    SHOE = 5
    BAG = 6
    HAT = 7


@dataclass(frozen=True, slots=True)
class Appearance:
    """How one person looks, the same in every frame. Colours are names; `*_rgb` are 0 to 1."""

    top: str
    lower: str
    bag: str | None
    hat: str | None
    top_rgb: Rgb
    lower_rgb: Rgb
    bag_rgb: Rgb
    hat_rgb: Rgb
    skin_rgb: Rgb
    hair_rgb: Rgb
    shoe_rgb: Rgb
    girth: float  # width factor, about 1
    lower_kind: str  # of LOWER_KINDS
    bag_kind: str  # backpack | handbag
    long_sleeves: bool
    top_length: float  # how far the top hangs below the hips
    long_hair: bool
    stripes: float  # contrast of stripes on the top, 0: none
    seed: int  # of the cloth's texture


@dataclass(frozen=True, slots=True)
class Sprite:
    """One drawn figure: `rgb` (H, W, 3) and `alpha` (H, W) 0 to 1, `parts` (H, W); `foot` is (x, y) of its soles."""

    rgb: Floats
    alpha: Floats
    parts: Bytes
    foot: Point


def shade_of(name: str, rng: np.random.Generator) -> Rgb:
    """One shade of a named colour."""
    hue, saturation, value = (float(rng.uniform(*limits)) for limits in COLOURS[name])
    return colorsys.hsv_to_rgb(hue % 1.0, saturation, value)


def _pick(rng: np.random.Generator, weights: tuple[float, ...]) -> str:
    share = np.asarray(weights)
    return str(rng.choice(COLOUR_NAMES, p=share / share.sum()))


def random_appearance(rng: np.random.Generator) -> Appearance:
    """One person's looks."""
    top, lower = _pick(rng, _TOP_WEIGHTS), _pick(rng, _LOWER_WEIGHTS)
    bag = _pick(rng, _BAG_WEIGHTS) if rng.random() < 0.35 else None
    hat = _pick(rng, _BAG_WEIGHTS) if rng.random() < 0.22 else None
    tone = float(rng.beta(1.3, 1.6))
    light, dark = np.array([0.96, 0.78, 0.66]), np.array([0.30, 0.19, 0.13])
    skin = light + (dark - light) * tone
    hair = np.array([[0.08, 0.06, 0.05], [0.25, 0.16, 0.09], [0.55, 0.42, 0.22], [0.62, 0.60, 0.58]])
    hair_rgb = hair[rng.choice(4, p=[0.45, 0.3, 0.15, 0.1])] * rng.uniform(0.8, 1.15)
    shoe = np.array([[0.08, 0.08, 0.08], [0.85, 0.85, 0.85], [0.3, 0.2, 0.12]])[rng.integers(3)]
    return Appearance(
        top=top,
        lower=lower,
        bag=bag,
        hat=hat,
        top_rgb=shade_of(top, rng),
        lower_rgb=shade_of(lower, rng),
        bag_rgb=shade_of(bag or "black", rng),
        hat_rgb=shade_of(hat or "black", rng),
        skin_rgb=(float(skin[0]), float(skin[1]), float(skin[2])),
        hair_rgb=(float(hair_rgb[0]), float(hair_rgb[1]), float(hair_rgb[2])),
        shoe_rgb=(float(shoe[0]), float(shoe[1]), float(shoe[2])),
        girth=float(rng.uniform(0.85, 1.3)),
        lower_kind=str(rng.choice(LOWER_KINDS, p=[0.76, 0.12, 0.12])),
        bag_kind=str(rng.choice(["backpack", "handbag"])),
        long_sleeves=bool(rng.random() < 0.65),
        top_length=float(rng.choice([0.02, 0.05, 0.12], p=[0.4, 0.4, 0.2])),
        long_hair=bool(rng.random() < 0.4),
        stripes=float(rng.uniform(0.12, 0.3)) if rng.random() < 0.15 else 0.0,
        seed=int(rng.integers(2**31)),
    )


def _noise_tile(side: int = 256) -> Floats:
    """Smooth periodic-looking noise of mean 0 and deviation 1, for cloth."""
    rng = np.random.default_rng(7)
    total = np.zeros((side, side), np.float32)
    for step, weight in ((4, 0.5), (16, 1.0), (32, 0.8)):
        coarse = rng.normal(size=(side // step, side // step)).astype(np.float32)
        total += weight * np.kron(coarse, np.ones((step, step), np.float32))
    kernel = np.hanning(9).astype(np.float32)
    kernel /= kernel.sum()
    for axis in (0, 1):
        total = np.apply_along_axis(lambda line: np.convolve(line, kernel, mode="same"), axis, total).astype(np.float32)
    return np.asarray((total - total.mean()) / total.std(), np.float32)


_CLOTH = _noise_tile()


class _Canvas:
    """A sprite in the making; `tube` is the only brush."""

    def __init__(self, height_px: int, width_px: int, scale: float, origin: Point, light: Rgb, seed: int) -> None:
        self.rgb = np.zeros((height_px, width_px, 3), np.float32)
        self.alpha = np.zeros((height_px, width_px), np.float32)
        self.parts = np.zeros((height_px, width_px), np.uint8)
        self.scale = scale
        self.origin = origin
        self.light = light
        self.random = np.random.default_rng(seed)

    def tube(
        self,
        start: Point,
        end: Point,
        radii: tuple[float, ...],
        rgb: Rgb,
        part: Part,
        *,
        texture: float = 0.05,
        stripes: float = 0.0,
        hem: bool = False,
    ) -> None:
        """A shaded round body from `start` to `end` with `radii` at even stations; ends are round, a hem straight."""
        scale, (left, top) = self.scale, self.origin
        x0, y0 = left + start[0] * scale, top + start[1] * scale
        x1, y1 = left + end[0] * scale, top + end[1] * scale
        radius_px = np.maximum(0.6, np.asarray(radii, np.float32) * scale)
        reach = float(radius_px.max()) + 1.5
        height, width = self.alpha.shape
        first_x, last_x = max(0, int(min(x0, x1) - reach)), min(width, int(max(x0, x1) + reach) + 1)
        first_y, last_y = max(0, int(min(y0, y1) - reach)), min(height, int(max(y0, y1) + reach) + 1)
        if first_x >= last_x or first_y >= last_y:
            return
        dx, dy = x1 - x0, y1 - y0
        length = math.hypot(dx, dy)
        ux, uy = (dx / length, dy / length) if length > 1e-3 else (1.0, 0.0)
        across_x = np.arange(first_x, last_x, dtype=np.float32)[None, :] + 0.5 - x0
        across_y = np.arange(first_y, last_y, dtype=np.float32)[:, None] + 0.5 - y0
        along = across_x * ux + across_y * uy
        side = across_x * uy - across_y * ux
        inside = np.clip(along, 0.0, length)
        radius = np.interp(inside.ravel(), np.linspace(0, length, len(radius_px)), radius_px).reshape(along.shape)
        distance = np.hypot(side, along - inside)
        cover = np.clip(radius - distance + 0.5, 0.0, 1.0).astype(np.float32)
        if hem:
            cover *= np.clip(along + 0.5 + 0.02 * scale, 0.0, 1.0).astype(np.float32)
        bend = np.clip(side / radius, -1.0, 1.0)
        facing = np.sqrt(1.0 - bend * bend)
        lit = bend * (uy * self.light[0] - ux * self.light[1]) + facing * self.light[2]
        tone = 0.5 + 0.55 * np.clip(lit, 0.0, 1.0)
        if texture:
            row, column = self.random.integers(0, 256, 2)
            rows = (np.arange(first_y, last_y) * 256 // max(160, height) + row) % 256
            columns = (np.arange(first_x, last_x) * 256 // max(160, height) + column) % 256
            tone = tone * (1.0 + texture * _CLOTH[np.ix_(rows, columns)])
        if stripes:
            tone = tone * (1.0 - stripes * ((along / (0.035 * scale)).astype(np.int32) % 2))
        window = np.s_[first_y:last_y, first_x:last_x]
        solid = cover[..., None]
        colour = np.asarray(rgb, np.float32) * tone[..., None].astype(np.float32)
        self.rgb[window] += (colour - self.rgb[window]) * solid
        self.alpha[window] = np.maximum(self.alpha[window], cover)
        self.parts[window][cover > 0.5] = part


def draw_figure(look: Appearance, pose: Pose, height_px: float, light: Rgb = LIGHT) -> Sprite:
    """One person `height_px` tall. `light` points to the light: right, down, towards the camera."""
    scale = float(height_px)
    rows, columns = math.ceil(scale * 1.16) + 4, math.ceil(scale * 0.8) + 4
    foot = (columns / 2, rows - 2 - 0.06 * scale)
    canvas = _Canvas(rows, columns, scale, foot, light, look.seed)
    body = Skeleton(look.girth, pose)
    near = 0 if body.depths[0] >= body.depths[1] else 1
    behind = body.sin > 0  # the back is hidden when the person comes towards the camera
    side_on = abs(body.cos) > 0.5
    if look.bag and look.bag_kind == "backpack" and (behind or side_on):
        _backpack(canvas, body, look)
    _arm(canvas, body, look, 1 - near)
    _leg(canvas, body, look, 1 - near)
    _leg(canvas, body, look, near)
    if look.long_hair and behind:
        _long_hair(canvas, body, look)
    _torso(canvas, body, look)
    _head(canvas, body, look)
    if look.long_hair and not behind:
        _long_hair(canvas, body, look)
    if look.bag and look.bag_kind == "backpack" and not behind and not side_on:
        _backpack(canvas, body, look)
    _arm(canvas, body, look, near)
    if look.bag and look.bag_kind == "handbag":
        _handbag(canvas, body, look, near)
    return Sprite(np.clip(canvas.rgb, 0.0, 1.0), canvas.alpha, canvas.parts, foot)


def _leg(canvas: _Canvas, body: Skeleton, look: Appearance, which: int) -> None:
    hip, knee, ankle, toe = body.legs[which]
    wide = body.girth**0.7
    covered = look.lower_kind == "trousers"
    cloth, skin = (look.lower_rgb, Part.LOWER), (look.skin_rgb, Part.SKIN)
    thigh_rgb, thigh_part = cloth if look.lower_kind != "skirt" else skin
    shin_rgb, shin_part = cloth if covered else skin
    slim = 1.0 if covered else 0.85
    canvas.tube(ankle, toe, (0.026, 0.024), look.shoe_rgb, Part.SHOE, texture=0.0)
    canvas.tube(knee, ankle, (0.045 * wide * slim, 0.047 * wide * slim, 0.03 * slim), shin_rgb, shin_part)
    canvas.tube(hip, knee, (0.067 * wide, 0.062 * wide, 0.046 * wide), thigh_rgb, thigh_part)


def _arm(canvas: _Canvas, body: Skeleton, look: Appearance, which: int) -> None:
    shoulder, elbow, hand = body.arms[which]
    wide = body.girth**0.7
    fore_rgb, fore_part = (look.top_rgb, Part.TOP) if look.long_sleeves else (look.skin_rgb, Part.SKIN)
    darker = tuple(0.93 * value for value in look.top_rgb)
    canvas.tube(hand, hand, (0.022,), look.skin_rgb, Part.SKIN, texture=0.0)
    canvas.tube(elbow, hand, (0.033 * wide, 0.025), fore_rgb, fore_part)
    canvas.tube(shoulder, elbow, (0.043 * wide, 0.036 * wide), (darker[0], darker[1], darker[2]), Part.TOP)


def _torso(canvas: _Canvas, body: Skeleton, look: Appearance) -> None:
    hips, waist, chest = body.half_width(0.088, 0.07), body.half_width(0.08, 0.066), body.half_width(0.1, 0.075)
    low = (body.pelvis[0], body.pelvis[1] + 0.02)
    if look.lower_kind == "skirt":
        hem = (body.pelvis[0], body.pelvis[1] + 0.22)
        canvas.tube(low, hem, (hips, hips * 1.15, hips * 1.3), look.lower_rgb, Part.LOWER)
    else:
        canvas.tube(body.pelvis, low, (hips * 0.95, hips * 0.9), look.lower_rgb, Part.LOWER)
    yoke = body.half_width(0.065, 0.03) / body.girth**0.5
    left, right = (body.chest[0] - yoke, body.chest[1] + 0.02), (body.chest[0] + yoke, body.chest[1] + 0.02)
    canvas.tube(left, right, (0.045, 0.055, 0.045), look.top_rgb, Part.TOP)
    hem = (body.pelvis[0], body.pelvis[1] + look.top_length)
    top = (body.chest[0], body.chest[1] + 0.05)
    radii = (hips * 1.06, waist * 1.04, chest, chest * 0.97)
    canvas.tube(hem, top, radii, look.top_rgb, Part.TOP, texture=0.07, stripes=look.stripes, hem=True)


def _head(canvas: _Canvas, body: Skeleton, look: Appearance) -> None:
    x, y = body.head
    canvas.tube(body.neck, (x, y + 0.03), (0.032, 0.03), look.skin_rgb, Part.SKIN, texture=0.0)
    canvas.tube((x, y - 0.014), (x, y + 0.008), (0.064, 0.058), look.hair_rgb, Part.HAIR, texture=0.1)
    if body.sin > -0.55:  # some of the face is seen
        turn = body.cos * 0.024
        open_ = 0.05 if body.sin > 0.3 else 0.042
        canvas.tube(
            (x + turn, y - 0.002),
            (x + turn * 0.9, y + 0.03),
            (open_, open_ * 0.72),
            look.skin_rgb,
            Part.SKIN,
            texture=0.0,
        )
        if body.sin > 0.3:
            dark = (look.skin_rgb[0] * 0.35, look.skin_rgb[1] * 0.35, look.skin_rgb[2] * 0.35)
            for eye in (-0.02, 0.02):
                place = (x + turn + eye * body.sin, y + 0.0)
                canvas.tube(place, place, (0.007,), dark, Part.SKIN, texture=0.0)
            canvas.tube(
                (x + turn - 0.012, y + 0.032), (x + turn + 0.012, y + 0.032), (0.004,), dark, Part.SKIN, texture=0.0
            )
    if look.hat:
        canvas.tube((x - 0.034, y - 0.045), (x + 0.034, y - 0.045), (0.032, 0.04, 0.032), look.hat_rgb, Part.HAT)
        if body.sin > -0.55:
            brim = body.cos * 0.075
            canvas.tube((x, y - 0.03), (x + brim, y - 0.026), (0.02, 0.012), look.hat_rgb, Part.HAT)


def _long_hair(canvas: _Canvas, body: Skeleton, look: Appearance) -> None:
    x, y = body.head
    back = -0.03 * body.cos
    canvas.tube((x + back, y - 0.01), (x + back * 1.3, y + 0.115), (0.06, 0.056, 0.04), look.hair_rgb, Part.HAIR)


def _backpack(canvas: _Canvas, body: Skeleton, look: Appearance) -> None:
    back = body.at(-0.1 * body.girth, body.hip + 0.24, 0.0)
    low = body.at(-0.1 * body.girth, body.hip + 0.08, 0.0)
    wide = body.half_width(0.078, 0.05) / body.girth**0.5
    canvas.tube(back, low, (wide * 0.85, wide, wide * 0.95), look.bag_rgb, Part.BAG, texture=0.06)


def _handbag(canvas: _Canvas, body: Skeleton, look: Appearance, near: int) -> None:
    hand = body.arms[near][2]
    dark = (look.bag_rgb[0] * 0.6, look.bag_rgb[1] * 0.6, look.bag_rgb[2] * 0.6)
    wide = 0.03 + 0.045 * abs(body.cos)
    canvas.tube(hand, (hand[0], hand[1] + 0.05), (0.006,), dark, Part.BAG, texture=0.0)
    left, right = (hand[0] - wide, hand[1] + 0.1), (hand[0] + wide, hand[1] + 0.1)
    canvas.tube(left, right, (0.048, 0.052, 0.048), look.bag_rgb, Part.BAG, texture=0.06)
