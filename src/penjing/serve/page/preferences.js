// What a page keeps in this browser, and the two switches of every page: its language, and light or dark.

import { $, el, fill, icon } from "./dom.js";
import { current, setLanguage, t } from "./i18n.js";

const SETTINGS = "penjing.settings"; // theme.js reads it too

/** What is kept under a key; `fallback` where nothing is, or there is no storage (a private window). */
export function read(key, fallback, storage = "localStorage") {
  try {
    return JSON.parse(window[storage].getItem(key)) ?? fallback;
  } catch {
    return fallback;
  }
}

export function write(key, value, storage = "localStorage") {
  try {
    window[storage].setItem(key, JSON.stringify(value));
  } catch {
    // Full, or no storage at all.
  }
}

export const settings = read(SETTINGS, {});

export function change(part) {
  Object.assign(settings, part);
  write(SETTINGS, settings);
}

const isDark = () => document.documentElement.dataset.theme === "dark";

/** Take the language that was chosen, else the browser's, and label the switches. */
export function showSwitches() {
  setLanguage(settings.language);
  fill($("#language"), el("span", { lang: current() === "zh" ? "en" : "zh-Hans", text: t("languageShort") }));
  $("#language").setAttribute("aria-label", `${t("languageShort")}: ${t("language")}`);
  fill($("#theme"), icon(isDark() ? "sun" : "moon"));
  $("#theme").setAttribute("aria-label", t("theme"));
  $("#theme").title = t("theme");
}

/** onLanguage, onTheme: called after somebody changed it. */
export function wireSwitches(onLanguage, onTheme = () => {}) {
  $("#language").addEventListener("click", () => {
    change({ language: current() === "zh" ? "en" : "zh" });
    onLanguage();
  });
  const changed = () => (showSwitches(), onTheme());
  $("#theme").addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    change({ theme: document.documentElement.dataset.theme });
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
