// The words of the tab of training.

import { addWords } from "./i18n.js";

addWords({
  trainLoading: ["Loading the settings: the first time takes some seconds…", "正在加载设置，第一次需要几秒钟…"],
  trainRecipe: ["Recipe", "配方"],
  trainRecipes: ["Recipes", "配方"],
  trainAsRun: ["As in a run", "沿用某个运行"],
  trainSearch: ["Search settings", "搜索设置"],
  trainOften: ["Most used", "常用"],
  trainRun: ["run", "运行"],
  trainUndo: ["Back to the recipe’s {name}", "恢复配方中的 {name}"],
  trainStart: ["Start training", "开始训练"],
  trainReset: ["Undo all changes", "撤销全部改动"],
  trainInto: ["Trains into {out}. The run goes on when this page or its server ends.", "训练结果写入 {out}。关闭页面或其服务器后，训练照常进行。"],
});
