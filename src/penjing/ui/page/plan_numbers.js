// Numbers as people write them, in both languages.

import { t } from "./i18n.js";

const SIZES = { k: 1e3, m: 1e6, b: 1e9, g: 1e9, t: 1e12, 万: 1e4, 亿: 1e8 };

/** "25M", "2B tokens", "1,000", "3.5 亿" -> a whole number; null for anything else. */
export function readNumber(text) {
  const match = /^\s*([\d][\d,_]*\.?\d*(?:e\d+)?)\s*(?:([kmbgt万亿])(?![a-z]))?\s*[a-z\u4e00-\u9fff]*\s*$/i.exec(String(text));
  if (!match) return null;
  const value = Math.round(Number(match[1].replace(/[,_]/g, "")) * (SIZES[(match[2] || "").toLowerCase()] || 1));
  return Number.isFinite(value) ? value : null;
}

/** 95 s -> 1 min 35 s */
export function duration(value) {
  const seconds = Math.round(value);
  const two = (number) => String(number).padStart(2, "0");
  if (value < 10) return t("planSeconds", { s: Number(value.toPrecision(2)) });
  if (seconds < 60) return t("planSeconds", { s: seconds });
  if (seconds < 3600) return t("planMinutes", { m: Math.floor(seconds / 60), s: two(seconds % 60) });
  if (seconds < 86400) return t("planHours", { h: Math.floor(seconds / 3600), m: two(Math.floor((seconds % 3600) / 60)) });
  const days = seconds / 86400;
  if (days < 100) return t("planDays", { d: Math.floor(days), h: two(Math.floor((seconds % 86400) / 3600)) });
  return days < 730 ? t("planManyDays", { d: Math.round(days) }) : t("planYears", { y: Number((days / 365.25).toPrecision(2)) });
}

export const gibibytes = (bytes) => `${(bytes / 2 ** 30).toFixed(bytes < 100 * 2 ** 30 ? 2 : 0)} GiB`;
