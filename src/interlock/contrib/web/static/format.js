// Durations and times, for people.

/** 0.4 s, 12 s, 3 min 5 s, 2 h 10 min, 4 d 1 h */
export function span(seconds) {
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  const whole = Math.floor(seconds);
  for (const [unit, size, smaller, rest] of [["d", 86400, "h", 3600], ["h", 3600, "min", 60], ["min", 60, "s", 1]]) {
    if (whole < size) continue;
    const more = Math.floor((whole % size) / rest);
    return `${Math.floor(whole / size)} ${unit}${more ? ` ${more} ${smaller}` : ""}`;
  }
  return `${whole} s`;
}

/** 3 ms, 0.4 s: for the scale of a histogram */
export function short(seconds) {
  if (seconds < 0.9995) return `${Number((seconds * 1000).toPrecision(2))} ms`;
  return seconds < 99.5 ? `${Number(seconds.toPrecision(2))} s` : span(seconds);
}

const TIME = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const MOMENT = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "long" });

/** The time of day, in the reader's zone. */
export const clock = (seconds) => TIME.format(seconds * 1000);

/** Day and time, with the reader's zone. */
export const moment = (seconds) => MOMENT.format(seconds * 1000);

export const many = (number, one, more = `${one}s`) => `${number.toLocaleString()} ${number === 1 ? one : more}`;

/** 12, 3.4: of something a second */
export const rate = (number) => (number < 10 ? number.toPrecision(2).replace(/\.0$/, "") : Math.round(number).toString());
