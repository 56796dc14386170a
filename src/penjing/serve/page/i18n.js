// The page in two languages. tests/serve/test_page.py checks that no sentence is missing in one.

import { SENTENCES } from "./sentences.js";

const LANGUAGES = ["en", "zh"];

let language = "en";

/** More sentences, of a part of a page: {key: [English, Chinese]}. */
export const addWords = (words) => Object.assign(SENTENCES, words);

export function current() {
  return language;
}

/** A sentence. {name} in it is replaced by values.name. other: where there is none of this key. */
export function t(key, values = {}, other = key) {
  const sentence = SENTENCES[key]?.[LANGUAGES.indexOf(language)] ?? other;
  return sentence.replace(/\{(\w+)\}/g, (_, name) => String(values[name] ?? ""));
}

/** Change the language, and what stands in the document: data-i18n is a text, data-i18n-NAME an attribute NAME. */
export function setLanguage(next) {
  const browsers = navigator.language.toLowerCase().startsWith("zh") ? "zh" : "en";
  language = LANGUAGES.includes(next) ? next : browsers;
  document.documentElement.lang = language === "zh" ? "zh-Hans" : "en";
  for (const node of document.querySelectorAll("[data-i18n]")) node.textContent = t(node.dataset.i18n);
  for (const name of ["aria-label", "placeholder", "title"]) {
    for (const node of document.querySelectorAll(`[data-i18n-${name}]`)) {
      node.setAttribute(name, t(node.getAttribute(`data-i18n-${name}`)));
    }
  }
}

/** 12345 -> 12,345 */
export const count = (value) => Math.round(value).toLocaleString(language === "zh" ? "zh-CN" : "en-US");

/** The shortest form that loses less than a hundredth: 2000000000 -> 2B. */
export function short(value) {
  for (const [size, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(4)));
}

/** Seconds as people say them: 38 ms, 1.2 s. */
export function seconds(value) {
  return value < 1 ? `${Math.round(value * 1000)} ms` : `${value.toFixed(value < 10 ? 1 : 0)} s`;
}

/** A probability as people say it: 41 %, 3.2 %, <0.1 %. */
export function percent(probability) {
  const value = probability * 100;
  if (value < 0.1) return "<0.1 %";
  if (value > 99.9 && value < 100) return ">99.9 %";
  return `${value < 10 || value > 99 ? Number(value.toFixed(1)) : Math.round(value)} %`;
}
